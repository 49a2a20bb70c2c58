"""What vLLM's workers run to receive weights, or adapters: backends of vLLM's weight transfer, shaped as its own.

vLLM finds them, in each of its processes, through the entry-point group `vllm.general_plugins`. `gloo` is there for engines on CPUs, which
thus take the same path as those on GPUs. `watched_nccl` is vLLM's own, whose broadcasts end when the trainer's side has left the group.
An engine with `enable_lora` takes adapters instead of weights (`adapter_slot`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from grpo_workload.contract import Device
from grpo_workload.engine_command import TRANSFER_BACKENDS
from grpo_workload.generation.adapter_slot import AdapterSlot
from grpo_workload.generation.gloo_group import GlooGroup, open_store
from grpo_workload.generation.store_watch import abort_when_left
from grpo_workload.generation.vllm_api import nccl_abort, repack_output_layer
from grpo_workload.packing import TensorSpec, described, empty, pieces, unpack

NOT_JOINED = "the transfer group was not joined; init_weight_transfer_engine comes first"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped
    """All tensors of an update, in order, and up to how many bytes of them come at once."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    piece_bytes: int

    @property
    def specs(self) -> list[TensorSpec]:
        """As the sender has them."""
        return described(self.names, self.dtype_names, self.shapes)


class Receiver:
    """What is the same for all: the form of updates, and that an engine with adapters receives these, its model keeping its weights."""

    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self._slot = AdapterSlot(model, vllm_config.lora_config) if vllm_config.lora_config is not None else None
        super().__init__(config, vllm_config, device, self._slot or model)  # type: ignore[call-arg]  # of vLLM's engine

    def start_weight_update(self) -> None:
        """Prepare for weights in checkpoint format."""
        if self._slot is not None:
            self._slot.clear()
        else:
            super().start_weight_update()  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        """Use what was received."""
        if self._slot is not None:
            self._slot.fill()
        else:
            super().finish_weight_update()  # type: ignore[misc]

    def load(self, update_info: UpdateInfo, broadcast: Callable[[Tensor], None]) -> None:
        """Receive all pieces by `broadcast`, while vLLM loads what they hold: in one call, since each walks through the whole model.

        On one stream, in whose order memory is used again: vLLM keeps tensors of layers that lack some until another piece has those.
        """

        def receive() -> Iterator[tuple[str, Tensor]]:
            for specs in pieces(update_info.specs, update_info.piece_bytes):
                bytes_N = empty(specs, self.device)  # type: ignore[attr-defined]
                broadcast(bytes_N)
                yield from unpack(bytes_N, specs)

        weights = receive()
        self.model.load_weights(weights)  # type: ignore[attr-defined]
        for _ in weights:  # the others wait for this one in every broadcast, also where a model has no use for the last weights
            pass


class WatchedNcclReceiver(Receiver, NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's own. A broadcast whose sender has left fails here: NCCL would wait in it for good, and this worker answer to nothing."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load all weights. RuntimeError where the sender has left the group."""
        group = self.model_update_group
        if group is None:
            raise RuntimeError(NOT_JOINED)
        with abort_when_left(group.group.store, lambda: nccl_abort(group)):
            self.load(update_info, lambda bytes_N: group.broadcast(bytes_N, src=0))
            torch.cuda.synchronize()


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the group meets, and this engine's place in it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    generation: int


class LayerwiseGloo(WeightTransferEngine[GlooInitInfo, UpdateInfo]):  # type: ignore[misc]
    """The worker's side of gloo, as vLLM's NCCLWeightTransferEngine."""

    init_info_cls = GlooInitInfo
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

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


class GlooReceiver(Receiver, LayerwiseGloo):
    """Weights or adapters over gloo."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load all weights. RuntimeError where a member is gone."""
        if self._group is None:
            raise RuntimeError(NOT_JOINED)
        try:
            self.load(update_info, self._group.broadcast)
        except BaseException:
            self._group.close()  # or the others would wait for this one
            raise


def register() -> None:
    """Make the backends known to vLLM; it calls this in each of its processes, in some of them more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    for device, receiver in ((Device.CPU, GlooReceiver), (Device.CUDA, WatchedNcclReceiver)):
        if (name := TRANSFER_BACKENDS[device]) not in registry:
            WeightTransferEngineFactory.register_engine(name, __name__, receiver.__name__)
