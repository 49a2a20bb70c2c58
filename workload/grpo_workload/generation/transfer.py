"""The trainer's side of weight transfer: the rank that is rank 0 of one transfer group and feeds all engines of it.

vLLM's protocol: pause, start, update, finish, reset the prefix cache, resume. The engines receive inside `update` what this rank
broadcasts at the same time, piece by piece, so that the failure of either side ends the wait for both. Meanwhile the next piece is
gathered and packed: two of them are held at most. The first is, while the engines pause, which they may begin to do long before.

A group that has lost a member is given up, and another one, of the next generation, is built with the engine's new process. With gloo,
the workers of the other engines fail when a member dies; with NCCL when this side has left the group, which they notice by its store.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from grpo_workload.buckets import one_ahead
from grpo_workload.contract import TransferGroup
from grpo_workload.generation import vllm_api
from grpo_workload.generation.engine_client import EngineClient
from grpo_workload.generation.engine_link import EngineLink, in_thread, settle
from grpo_workload.generation.gloo_group import LEFT
from grpo_workload.generation.vllm_api import Backend
from grpo_workload.packing import TensorSpec, describe, pack

T = TypeVar("T")

# Broadcast at once. Smaller on CPUs, where memory is what models share.
PIECE_BYTES: dict[Backend, int] = {"nccl": 2**28, "gloo": 2**26}


class Channel(Protocol):
    """A joined group."""

    def broadcast(self, bytes_N: Tensor) -> None:
        """Send a piece to all others; returns when it has been sent."""
        ...

    def close(self) -> None:
        """Leave the group, whatever its members are at."""
        ...


class NcclChannel:
    """vLLM's NCCL group, on the CUDA device of the thread that joins."""

    def __init__(self, group: TransferGroup) -> None:
        try:
            self._communicator = vllm_api.nccl_join(host=group.host, port=group.port, world_size=group.world_size)
        except OSError as error:  # a group that never came together holds the port for vLLM's timeout of 300 s
            raise RuntimeError(f"rank {group.sender} cannot listen on {group.host}:{group.port} for the transfer group: {error}") from error
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # apart from the one that the next piece is made on
        self._left = False

    def broadcast(self, bytes_N: Tensor) -> None:
        """See `Channel.broadcast`."""
        if self._left:
            raise RuntimeError(LEFT)
        self._communicator.broadcast(bytes_N, src=0, stream=self._stream)
        self._stream.synchronize()

    def close(self) -> None:
        """See `Channel.close`."""
        self._left = True
        vllm_api.nccl_leave(self._communicator)


class WeightSender:
    """Rank 0 of `group`, which consists of it and the workers of `clients`."""

    def __init__(self, group: TransferGroup, clients: Sequence[EngineClient], link: EngineLink, backend: Backend) -> None:
        check_group(group, clients)
        self._group, self._clients, self._link, self._backend = group, clients, link, backend
        self._device = torch.cuda.current_device() if backend == "nccl" else None
        self._store: Any = None  # of gloo: where all generations meet
        self._channel: Channel | None = None
        self._pausing: Future[Any] | None = None

    def join(self, generation: int) -> None:
        """Build the group together with the engines. EngineError, or RuntimeError when none of them can be blamed, if that fails.

        After the first generation the engines may have been left in the middle of an update, and are first brought out of it.
        """
        self._leave()
        if (pausing := self._take_pausing()) is not None:
            wait([pausing])  # however it ends: a pause that comes late would outlast the next push
        if generation > 1:
            self._each(lambda client: client.abandon_update())  # its workers answer, so that none of them is in an old group still
        infos = {client.engine.name: self._init_info(client, generation) for client in self._clients}
        self._channel = self._together(partial(self._open, generation), lambda client: client.init_transfer(infos[client.engine.name]))

    def pause_ahead(self) -> None:
        """Let the engines begin to pause; `push` comes next. Only when all ranks have all that they want of them."""
        self._pausing = self._pause()

    def push(self, specs: Sequence[TensorSpec], weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights of all engines, which are paused meanwhile, by `weights`, which `specs` tells of.

        Errors as on joining, and the engines are then of no use.
        """
        assert self._channel is not None, "join comes first"
        piece_bytes = PIECE_BYTES[self._backend]
        info = describe(specs) | {"piece_bytes": piece_bytes}
        with one_ahead(self._packed(specs, weights, piece_bytes), self._use_device) as packed:
            (self._take_pausing() or self._pause()).result()
            self._each(lambda client: client.start_update())
            try:
                self._together(partial(_send, self._channel, packed), lambda client: client.update(info))
            except BaseException:
                # A broadcast that lacks a member never ends by itself: its kernel would stop whatever waits for the whole device.
                self._leave()
                raise
        self._each(lambda client: client.finish_update(version))
        self._each(lambda client: client.reset_prefix_cache())
        self._each(lambda client: client.resume())

    def _pause(self) -> Future[Any]:
        return self._begin(lambda client: client.pause())

    def _take_pausing(self) -> Future[Any] | None:
        pausing, self._pausing = self._pausing, None
        return pausing

    def _packed(self, specs: Sequence[TensorSpec], weights: Iterable[tuple[str, Tensor]], piece_bytes: int) -> Iterator[Tensor]:
        """Pieces that are written: what sends them has a stream of its own."""
        device = torch.device("cpu") if self._device is None else torch.device("cuda", self._device)
        for bytes_N in pack(specs, weights, piece_bytes, device):
            if self._device is not None:
                torch.cuda.current_stream().synchronize()
            yield bytes_N

    def _use_device(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _init_info(self, client: EngineClient, generation: int) -> dict[str, Any]:
        return vllm_api.init_info(
            self._backend,
            host=self._group.host,
            port=self._group.port,
            rank_offset=client.engine.rank_offset,
            world_size=self._group.world_size,
            generation=generation,
        )

    def _open(self, generation: int) -> Channel:
        if self._backend == "nccl":
            return NcclChannel(self._group)
        from grpo_workload.generation.gloo_group import GlooGroup, open_store

        if self._store is None:
            self._store = open_store(self._group.host, self._group.port, listens=True)
        return GlooGroup(self._store, rank=0, world_size=self._group.world_size, generation=generation)

    def _each(self, call: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
        self._begin(call).result()

    def _begin(self, call: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> Future[Any]:
        return self._link.begin(settle(self._clients, [call(client) for client in self._clients]))

    def _together(self, own: Callable[[], T], theirs: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> T:
        """Run `own`, which blocks until the engines take part, on a thread, and `theirs` of each engine."""

        def on_device() -> T:
            self._use_device()
            return own()

        result: T
        result, *_ = self._link.run(settle(self._clients, [in_thread(on_device), *(theirs(client) for client in self._clients)]))
        return result


def check_group(group: TransferGroup, clients: Sequence[EngineClient]) -> None:
    """AssertionError unless the workers of all engines are exactly the ranks of the group after the sender's."""
    ranks = [rank for client in clients for rank in range(client.engine.rank_offset, client.engine.rank_offset + client.engine.world_size)]
    assert sorted(ranks) == list(range(1, group.world_size)), (ranks, group.world_size)


def _send(channel: Channel, packed: Iterable[Tensor]) -> None:
    for bytes_N in packed:
        channel.broadcast(bytes_N)
