"""Backends of vLLM's weight transfer with which its workers receive weights or adapters.

vLLM loads them in each of its processes through the entry-point group `vllm.general_plugins`. `gloo` is for engines on
CPUs, so that these take the same path as engines on GPUs. `watched_nccl` is vLLM's own backend, but its broadcasts fail
when the trainer has left the group. An engine with `enable_lora` receives adapters instead of weights (`adapter_slot`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from grpo_spec.contract import Device
from grpo_workload.generation.audit import Audit, Rows, rows_of
from grpo_workload.generation.derived import follow_loads
from grpo_workload.generation.gloo_group import GlooGroup
from grpo_workload.generation.roll_call import Invitation, Seat, open_store
from grpo_workload.generation.vllm_api import nccl_abort, repack_for_cpu
from grpo_workload.generation.vllm_worker.adapter_slot import AdapterSlot
from grpo_workload.generation.vllm_worker.store_watch import abort_when_left
from grpo_workload.pod.vllm_command import TRANSFER_BACKENDS
from grpo_workload.weights.wire import TensorSpec, empty, parse_description, pieces, unpack

NOT_JOINED = "the worker is in no transfer group; init_weight_transfer_engine comes first"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped
    """All tensors of an update, in the order in which they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    piece_bytes: int  # largest number of bytes sent at once, unless one tensor is larger
    is_initial: bool  # whether the engine has loaded just these weights itself

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors' names, types and shapes, as the sender has them."""
        return parse_description(self.names, self.dtype_names, self.shapes)


class Receiver:
    """Common part of all backends. An engine with adapters receives only these; its model keeps its weights."""

    init_info_cls = Invitation
    update_info_cls = UpdateInfo
    _seat: Seat
    _audit: Audit

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self._slot = AdapterSlot(model, vllm_config.lora_config) if vllm_config.lora_config is not None else None
        self._is_quantized = vllm_config.model_config.quantization is not None
        self._before: Rows | None = None  # the model's parameters before its first update
        self._is_initial = False
        self._has_arrived = False  # whether all weights of the present update have
        super().__init__(config, vllm_config, device, self._slot or model)  # type: ignore[call-arg]  # of vLLM's engine

    def init_transfer_engine(self, invitation: Invitation) -> None:
        """Join a group once all of its members are there. RuntimeError when it is called off."""
        # Ranks are numbered as vLLM does for NCCL: copy by copy of data parallelism.
        parallel = self.parallel_config  # type: ignore[attr-defined]
        rank = invitation.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = open_store(invitation.host, invitation.port, timeout_seconds=invitation.patience)
        self._seat = Seat(store, invitation.meeting, rank)
        self.join(invitation, rank, store, self._seat.check_in())  # type: ignore[attr-defined]

    def start_weight_update(self) -> None:
        """Prepare for weights in checkpoint format, or for an adapter."""
        self._has_arrived = False
        if self._slot is not None:
            self._slot.clear()
        else:
            if self._before is None and not self._is_quantized:
                self._before = rows_of(self.model)  # type: ignore[attr-defined]
            self._audit = Audit(self.model, is_quantized=self._is_quantized)  # type: ignore[attr-defined]
            super().start_weight_update()  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        """Put the received weights or adapter into use. WeightsDifferError for weights that changed on the way."""
        if self._slot is not None:
            self._slot.fill()
            return
        before, has_arrived = self._before if self._is_initial else None, self._has_arrived
        self._before, self._is_initial, self._has_arrived = {}, False, False  # vLLM finishes a refused update once more
        with self._audit:
            super().finish_weight_update()  # type: ignore[misc]
        if has_arrived:  # else the update is abandoned
            self._audit.finish(before or {})

    def load(self, update_info: UpdateInfo, broadcast: Callable[[Tensor], None]) -> None:
        """Receive all pieces by `broadcast` while vLLM loads them, in one call: each call walks the whole model.

        All of it runs on one stream, which orders the reuse of memory. vLLM keeps the tensors of a layer until all of
        them, perhaps from several pieces, have arrived.

        Raises:
            WeightsDifferError: see `Audit.load`.
        """

        def receive() -> Iterator[tuple[str, Tensor]]:
            for specs in pieces(update_info.specs, update_info.piece_bytes):
                bytes_N = empty(specs, self.device)  # type: ignore[attr-defined]
                broadcast(bytes_N)
                self._seat.count_piece()
                yield from unpack(bytes_N, specs)

        weights = receive()
        if self._slot is not None:
            self._slot.load_weights(weights)
        else:
            with self._audit:
                self._audit.load(self.model.load_weights, weights)  # type: ignore[attr-defined]
        self._is_initial, self._has_arrived = update_info.is_initial, True


class WatchedNcclReceiver(Receiver, NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's NCCL backend, but a broadcast fails when its sender has left; NCCL would block the worker forever."""

    def join(self, invitation: Invitation, _rank: int, _store: Any, word: str) -> None:
        """Join NCCL's group, whose port is the sender's word."""
        if (old := self.model_update_group) is not None and old.available:
            nccl_abort(old)  # its memory would stay until the process ends
        plain = NCCLWeightTransferEngine.init_info_cls(
            master_address=invitation.host,
            master_port=int(word),
            rank_offset=invitation.rank_offset,
            world_size=invitation.world_size,
        )
        NCCLWeightTransferEngine.init_transfer_engine(self, plain)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load all weights. RuntimeError when the sender has left the group."""
        group = self.model_update_group
        if group is None:
            raise RuntimeError(NOT_JOINED)
        with abort_when_left(group.group.store, lambda: nccl_abort(group)):
            self.load(update_info, lambda bytes_N: group.broadcast(bytes_N, src=0))
            torch.cuda.synchronize()


class LayerwiseGloo(WeightTransferEngine[Invitation, UpdateInfo]):  # type: ignore[misc]
    """The worker's side of gloo, written like vLLM's NCCLWeightTransferEngine."""

    _group: GlooGroup | None = None

    def join(self, invitation: Invitation, rank: int, store: Any, _word: str) -> None:
        """Join the group."""
        self._group = None  # leave the group of an earlier round
        self._group = GlooGroup(
            store,
            rank=rank,
            world_size=invitation.world_size,
            meeting=invitation.meeting,
            timeout_seconds=invitation.patience,
        )

    def start_weight_update(self) -> None:
        """Prepare all layers for weights in checkpoint format."""
        # Imported late, here and below: this module is loaded as a plugin, before vLLM is ready to import its models.
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Process the layers that are not processed yet."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_for_cpu(self.model)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


class GlooReceiver(Receiver, LayerwiseGloo):
    """Receives weights or adapters over gloo."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load all weights. RuntimeError when a member is gone."""
        if self._group is None:
            raise RuntimeError(NOT_JOINED)
        try:
            self.load(update_info, self._group.broadcast)
        except BaseException:
            self._group.close()  # else the other members would wait for this one
            raise


def register() -> None:
    """Register the backends with vLLM, which calls this in each of its processes, in some more than once."""
    follow_loads()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    for device, receiver in ((Device.CPU, GlooReceiver), (Device.CUDA, WatchedNcclReceiver)):
        if (name := TRANSFER_BACKENDS[device]) not in registry:
            WeightTransferEngineFactory.register_engine(name, __name__, receiver.__name__)
