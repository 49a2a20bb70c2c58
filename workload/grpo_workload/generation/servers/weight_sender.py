"""The trainer's side of weight transfer: rank 0 of a transfer group, which pushes weights to all engines of the group.

vLLM's protocol is: pause, start, update, finish, resume. The pause drops the prefix cache; but requests that go on
through updates are stopped where they are, and keep it. During `update` the engines receive,
piece by piece, what this rank broadcasts at the same time, so a failure of either side ends the wait of both. Meanwhile
the next piece is gathered and packed; at most two pieces exist at once. The first one is prepared while the engines
pause, and they may start to pause long before.

A group that has lost a member is given up. The group of the next round is built with the engine's new process. With
gloo, the other engines' workers fail when a member dies. With NCCL they fail when this side leaves the group, which
they notice by its store.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from grpo_spec.contract import Engine, TransferGroup
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.http_client import EngineClient, PauseMode
from grpo_workload.generation.servers.joining import Formed, Joining
from grpo_workload.generation.servers.push_progress import PushProgress
from grpo_workload.generation.servers.waiting import in_thread, settle
from grpo_workload.generation.vllm_api import Backend
from grpo_workload.weights.buckets import one_ahead
from grpo_workload.weights.digest import sums_spec, with_sums
from grpo_workload.weights.wire import TensorSpec, describe, pack, pieces

# Bytes of one broadcast; fewer on CPUs, where ranks and engines share the memory.
PIECE_BYTES: dict[Backend, int] = {"nccl": 2**28, "gloo": 2**26}


class WeightSender:
    """Rank 0 of a transfer group."""

    def __init__(
        self, group: TransferGroup, link: EngineLink, backend: Backend, *, keep: bool, begins_as_loaded: bool
    ) -> None:
        """`keep`: whether requests go on through updates. `begins_as_loaded`: see `TrainerConfig`."""
        self._link, self._backend = link, backend
        self._clients: Sequence[EngineClient] = ()  # of the engines in the group
        self._begins_as_loaded = begins_as_loaded
        self._mode: PauseMode = "keep" if keep else "wait"
        self._device = torch.cuda.current_device() if backend == "nccl" else None
        self._joining = Joining(group, link, backend, self._use_device)
        self._has_joined = False
        self._limit = 0.0  # seconds for which an engine that is not elastic may hold up a push
        self._formed: Formed | None = None
        self._pausing: Future[Any] | None = None

    def try_alone(self, client: EngineClient) -> None:
        """See `Joining.try_alone`. The present group stays as it is."""
        self._joining.try_alone(client)

    def join(self, clients: Sequence[EngineClient], *, limit: float) -> None:
        """Build the group together with the engines of `clients`. See `Joining.form`, also for the errors.

        From the second time on they may still be in the middle of an update, which is abandoned first. Engines that go
        on from an earlier attempt may be so at the first time, too.
        """
        self._leave()
        if (pausing := self._take_pausing()) is not None:
            wait([pausing])  # whether or not it succeeds: a late pause could outlast the next push
        self._clients = clients
        # Each worker answers these calls, so none of them is still in an old group.
        if self._has_joined:
            self._each(lambda client: client.abandon_update(self._mode))
        else:
            self._each(lambda client: client.forget_attempt())
        self._has_joined = True
        self._formed, self._limit = self._joining.form(clients, limit=limit), limit

    def pause_ahead(self) -> None:
        """Let the engines start to pause; call it only when all ranks have their completions. `push` comes next."""
        self._pausing = self._pause()

    def push(self, specs: Sequence[TensorSpec], weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights of all engines by `weights`, which `specs` describes; the engines pause meanwhile.

        Their digests follow them: engines refuse weights that changed on the way.

        It raises the same errors as `join`; the engines are then unusable.
        """
        assert self._formed is not None, "join comes first"
        piece_bytes, specs = PIECE_BYTES[self._backend], [*specs, sums_spec(len(specs))]
        info = describe(specs) | {"piece_bytes": piece_bytes, "is_initial": version == 0 and self._begins_as_loaded}
        with one_ahead(self._packed(specs, weights, piece_bytes), self._use_device) as packed:
            (self._take_pausing() or self._pause()).result()
            self._each(lambda client: client.start_update())
            try:
                self._update(self._formed, packed, info, total=len(list(pieces(specs, piece_bytes))))
            except BaseException:
                # A broadcast that lacks a member never ends by itself; its kernel would block every device
                # synchronisation.
                self._leave()
                raise
        self._each(lambda client: client.finish_update(version))
        self._each(lambda client: client.resume())

    def _pause(self) -> Future[Any]:
        return self._begin(lambda client: client.pause(self._mode))

    def _take_pausing(self) -> Future[Any] | None:
        pausing, self._pausing = self._pausing, None
        return pausing

    def _packed(
        self, specs: Sequence[TensorSpec], weights: Iterable[tuple[str, Tensor]], piece_bytes: int
    ) -> Iterator[Tensor]:
        """Yield pieces whose writes are complete, as they are sent on another stream."""
        device = torch.device("cpu") if self._device is None else torch.device("cuda", self._device)
        for bytes_N in pack(specs, with_sums(weights, device), piece_bytes, device):
            if self._device is not None:
                torch.cuda.current_stream().synchronize()
            yield bytes_N

    def _use_device(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def _leave(self) -> None:
        if self._formed is not None:
            self._formed.channel.close()
            self._formed = None

    def _each(self, call: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
        self._begin(call).result()

    def _begin(self, call: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> Future[Any]:
        return self._link.begin(settle(self._clients, [call(client) for client in self._clients]))

    def _update(self, formed: Formed, packed: Iterable[Tensor], info: Mapping[str, Any], *, total: int) -> None:
        """Send all pieces on a thread, where it blocks until the engines take them; return when they are loaded."""
        progress = PushProgress(formed.roll, formed.seats, total=total, limit_of=self._limit_of)

        def send() -> None:
            self._use_device()
            for bytes_N in packed:
                with progress.sending():
                    formed.channel.broadcast(bytes_N)

        theirs = [progress.answer(client, client.update(info)) for client in formed.clients]
        work = settle(formed.clients, [in_thread(send), *theirs])
        self._link.run(progress.unless_stalled(work, self._link.timing.poll / 4))

    def _limit_of(self, engine: Engine) -> float:
        return min(self._link.patience_to_join, self._limit) if engine.elastic else self._limit
