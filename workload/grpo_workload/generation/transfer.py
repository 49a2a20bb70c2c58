"""The trainer's side of weight transfer: the rank that is rank 0 of one transfer group and feeds all engines of it.

vLLM's protocol: pause, start, update with each bucket, finish, reset the prefix cache, resume. The engines receive inside `update` what
this rank broadcasts at the same time, so that both are always under way together, and the failure of either ends the wait for both.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

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


class NcclChannel:
    """vLLM's NCCL group, on the CUDA device of the thread that joins."""

    def __init__(self, group: TransferGroup) -> None:
        self._vllm = vllm_api.installed()
        self._communicator = vllm_api.nccl_join(self._vllm, host=group.host, port=group.port, world_size=group.world_size)

    def send(self, bucket: Bucket) -> None:
        """See `Channel.send`."""
        vllm_api.nccl_send(self._vllm, self._communicator, bucket)


class WeightSender:
    """Rank 0 of `group`, which consists of it and the workers of `clients`."""

    def __init__(self, group: TransferGroup, clients: Sequence[EngineClient], link: EngineLink, backend: Backend) -> None:
        """Join together with the engines. EngineError, or RuntimeError when none of them can be blamed, if that fails."""
        check_group(group, clients)
        self._clients, self._link, self._backend = clients, link, backend
        self._vllm = vllm_api.installed()
        self._device = torch.cuda.current_device() if backend == "nccl" else None
        infos = {
            client.engine.name: vllm_api.init_info(
                backend, self._vllm, host=group.host, port=group.port, rank_offset=client.engine.rank_offset, world_size=group.world_size
            )
            for client in clients
        }
        self._channel = self._together(partial(self._join, group), lambda client: client.init_transfer(infos[client.engine.name]))

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights of all engines; they are paused meanwhile. Errors as on joining, and the engines are then of no use."""
        self._each(lambda client: client.pause())
        self._each(lambda client: client.start_update())
        for bucket in buckets(weights, BUCKET_BYTES[self._backend]):
            if self._device is not None:
                torch.cuda.current_stream().synchronize()  # the sending thread has streams of its own
            info = vllm_api.update_info(self._backend, self._vllm, bucket)
            self._together(partial(self._channel.send, bucket), lambda client, info=info: client.update(info))  # type: ignore[misc]
        self._each(lambda client: client.finish_update(version))
        self._each(lambda client: client.reset_prefix_cache())
        self._each(lambda client: client.resume())

    def _join(self, group: TransferGroup) -> Channel:
        if self._backend == "nccl":
            return NcclChannel(group)
        from grpo_workload.generation.transfer_gloo import GlooGroup

        return GlooGroup(group.host, group.port, rank=0, world_size=group.world_size)

    def _each(self, call: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
        self._link.run(settle(self._clients, [call(client) for client in self._clients]))

    def _together(self, own: Callable[[], T], theirs: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> T:
        """Run `own`, which blocks until the engines take part, on a thread, and `theirs` of each engine."""

        def on_device() -> T:
            if self._device is not None:
                torch.cuda.set_device(self._device)
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
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket
