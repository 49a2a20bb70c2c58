"""The trainer's side of weight transfer: the rank that is rank 0 of one transfer group and feeds all engines of it.

vLLM's protocol: pause, start, update with each bucket, finish, reset the prefix cache, resume. The engines receive inside `update` what
this rank broadcasts at the same time, so that both are always under way together, and the failure of either ends the wait for both.
Meanwhile the next bucket is gathered: two of them are held at most.

A group that has lost a member is given up, and another one, of the next generation, is built with the engine's new process. With gloo,
the workers of the other engines fail when a member dies; with NCCL when this side has left the group, which they notice by its store.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from grpo_workload.buckets import cut, one_ahead
from grpo_workload.contract import TransferGroup
from grpo_workload.generation import vllm_api
from grpo_workload.generation.engine_client import EngineClient
from grpo_workload.generation.engine_link import EngineLink, in_thread, settle
from grpo_workload.generation.vllm_api import Backend, Bucket

T = TypeVar("T")

# Of one update: vLLM's own packing closes its buffers at 1 GiB. Smaller ones on CPUs, where memory is what models share.
BUCKET_BYTES: dict[Backend, int] = {"nccl": 2**30, "gloo": 2**26}


class Channel(Protocol):
    """A joined group."""

    def send(self, bucket: Bucket) -> None:
        """Broadcast a bucket; returns when it has been sent."""
        ...

    def close(self) -> None:
        """Leave the group, whatever its members are at."""
        ...


class NcclChannel:
    """vLLM's NCCL group, on the CUDA device of the thread that joins."""

    def __init__(self, group: TransferGroup) -> None:
        self._vllm = vllm_api.installed()
        try:
            self._communicator = vllm_api.nccl_join(self._vllm, host=group.host, port=group.port, world_size=group.world_size)
        except OSError as error:  # a group that never came together holds the port for vLLM's timeout of 300 s
            raise RuntimeError(f"rank {group.sender} cannot listen on {group.host}:{group.port} for the transfer group: {error}") from error

    def send(self, bucket: Bucket) -> None:
        """See `Channel.send`."""
        vllm_api.nccl_send(self._vllm, self._communicator, bucket)

    def close(self) -> None:
        """See `Channel.close`."""
        vllm_api.nccl_leave(self._communicator)


class WeightSender:
    """Rank 0 of `group`, which consists of it and the workers of `clients`."""

    def __init__(self, group: TransferGroup, clients: Sequence[EngineClient], link: EngineLink, backend: Backend) -> None:
        check_group(group, clients)
        self._group, self._clients, self._link, self._backend = group, clients, link, backend
        self._vllm = vllm_api.installed()
        self._device = torch.cuda.current_device() if backend == "nccl" else None
        self._store: Any = None  # of gloo: where all generations meet
        self._channel: Channel | None = None

    def join(self, generation: int) -> None:
        """Build the group together with the engines. EngineError, or RuntimeError when none of them can be blamed, if that fails.

        After the first generation the engines may have been left in the middle of an update, and are first brought out of it.
        """
        self._leave()
        if generation > 1:
            self._each(lambda client: client.pause())
            # Its workers answer, too: none of them is in an old group still.
            self._each(lambda client: client.abandon_update())
        infos = {client.engine.name: self._init_info(client, generation) for client in self._clients}
        self._channel = self._together(partial(self._open, generation), lambda client: client.init_transfer(infos[client.engine.name]))

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights of all engines; they are paused meanwhile. Errors as on joining, and the engines are then of no use."""
        assert self._channel is not None, "join comes first"
        self._each(lambda client: client.pause())
        self._each(lambda client: client.start_update())
        with one_ahead(self._made(weights), self._use_device) as made:
            for bucket in made:
                info = vllm_api.update_info(self._backend, self._vllm, bucket)
                try:
                    self._together(partial(self._channel.send, bucket), lambda client, info=info: client.update(info))  # type: ignore[misc]
                except BaseException:
                    # A broadcast that lacks a member never ends by itself: its kernel would stop whatever waits for the whole device.
                    self._leave()
                    raise
        self._each(lambda client: client.finish_update(version))
        self._each(lambda client: client.reset_prefix_cache())
        self._each(lambda client: client.resume())

    def _made(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets whose tensors are written: the sending thread has streams of its own."""
        for bucket in buckets(weights, BUCKET_BYTES[self._backend]):
            if self._device is not None:
                torch.cuda.current_stream().synchronize()
            yield bucket

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
            self._vllm,
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
        self._link.run(settle(self._clients, [call(client) for client in self._clients]))

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


def buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut `weights` into lists of at most `max_bytes` bytes, or of one tensor that is larger."""
    return cut(weights, max_bytes, lambda weight: weight[1].numel() * weight[1].element_size())
