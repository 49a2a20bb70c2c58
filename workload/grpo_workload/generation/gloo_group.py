"""A transfer group over gloo, for engines on CPUs: both its sides, the trainer's and those of vLLM's workers."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

LEFT = "this process has left the transfer group"
TIMEOUT_SECONDS = 300  # as vLLM's own for NCCL's rendezvous


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
        """Fill `bytes_N` with rank 0's. RuntimeError when a member is gone, or this one has left."""
        self._begin(bytes_N).wait()  # not by a name, which a failure's traceback would keep, and with it the connections

    def _begin(self, bytes_N: Tensor) -> Any:
        if (group := self._group) is None:
            raise RuntimeError(LEFT)
        return group.broadcast(bytes_N, 0)

    def close(self) -> None:
        """Close the connections, as soon as what is under way has failed: members that wait for this one fail then."""
        group, self._group = [self._group], None
        threading.Thread(target=group.clear, name="leave", daemon=True).start()  # torch's destructor waits
