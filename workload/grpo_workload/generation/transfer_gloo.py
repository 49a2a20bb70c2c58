"""vLLM's weight transfer over gloo, for engines on CPUs: the same protocol as over NCCL, so that CPU runs take the same path.

vLLM finds it as the backend "gloo" through the entry-point group `vllm.general_plugins`. A bucket is one broadcast of its tensors' bytes.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from grpo_workload.generation.vllm_api import Bucket, repack_output_layer

TIMEOUT_SECONDS = 300  # as vLLM's own for NCCL's rendezvous


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped
    """Where the group meets, and this engine's place in it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    generation: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors of one bucket, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


def open_store(host: str, port: int, *, listens: bool = False, timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
    """Where members meet; whoever `listens` keeps it for all generations, so that no port has to become free between them."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, port, is_master=listens, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


class GlooGroup:
    """A process group of its own, apart from torch's default one."""

    def __init__(self, store: Any, *, rank: int, world_size: int, generation: int = 1, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Join as `rank` of `world_size`; blocks until all have joined. RuntimeError after the timeout.

        Members of another `generation` never meet these.
        """
        prefixed = dist.PrefixStore(f"weights/{generation}", store)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(prefixed, rank, world_size, timedelta(seconds=timeout_seconds))

    def broadcast(self, bytes_N: Tensor) -> None:
        """Fill `bytes_N` with rank 0's. RuntimeError when a member is gone."""
        self._group.broadcast(bytes_N, 0).wait()

    def send(self, bucket: Bucket) -> None:
        """Rank 0's part of a bucket."""
        self.broadcast(torch.cat([tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]))

    def close(self) -> None:
        """Close the connections, as soon as what is under way has failed: members that wait for this one fail then."""
        group, self._group = [self._group], None
        threading.Thread(target=group.clear, name="leave", daemon=True).start()  # torch's destructor waits


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]
    """The worker's side, shaped as vLLM's NCCLWeightTransferEngine."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group; ranks are counted over data parallel copies first, as vLLM does for NCCL."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        rank = init_info.rank_offset + worker
        self._group = None  # of an earlier generation
        store = open_store(init_info.master_address, init_info.master_port)
        self._group = GlooGroup(store, rank=rank, world_size=init_info.world_size, generation=init_info.generation)

    def start_weight_update(self) -> None:
        """Prepare all layers for weights in checkpoint format."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Process the layers that are left."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_output_layer(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load one bucket."""
        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

        if self._group is None:
            raise RuntimeError("the transfer group was not joined; init_weight_transfer_engine comes first")
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(update_info.shapes, dtypes, strict=True)]
        bytes_N = torch.empty(sum(sizes), dtype=torch.uint8)
        self._group.broadcast(bytes_N)
        self.model.load_weights(unpack_tensor(bytes_N, update_info.names, update_info.shapes, dtypes, sizes))

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


def register() -> None:
    """Make the backend known to vLLM; it calls this in each of its processes, in some of them more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    if "gloo" not in registry:
        WeightTransferEngineFactory.register_engine("gloo", __name__, GlooWeightTransferEngine.__name__)
