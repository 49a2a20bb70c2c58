"""The channel of weights: rank 0's end of a transfer group."""

from __future__ import annotations

import socket
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_workload.generation import vllm_api
from grpo_workload.generation.gloo_group import LEFT


class Channel(Protocol):
    """A transfer group that this process has joined."""

    def broadcast(self, bytes_N: Tensor) -> None:
        """Send a piece to all other members; return when it has been sent."""
        ...

    def close(self) -> None:
        """Leave the group, whatever its members are doing."""
        ...


class NcclChannel:
    """vLLM's NCCL group on the current CUDA device of the thread that joins."""

    def __init__(self, host: str, port: int, world_size: int) -> None:
        self._communicator = vllm_api.nccl_join(host=host, port=port, world_size=world_size)
        # A separate stream: the next piece is packed on the default one at the same time.
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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


def free_port() -> int:
    """Return a port on which nobody listens: one of a group that never formed may be held for long."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
