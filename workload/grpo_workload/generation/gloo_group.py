"""A transfer group over gloo, for engines on CPUs: used by the trainer and by vLLM's workers."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

LEFT = "this process has left the transfer group"


class GlooGroup:
    """A process group apart from torch's default one."""

    def __init__(self, store: Any, *, rank: int, world_size: int, meeting: str, timeout_seconds: float) -> None:
        """Join as `rank` of `world_size`; block until all have joined. RuntimeError after the timeout.

        Members with another `meeting` never meet these.
        """
        prefixed = dist.PrefixStore(f"weights/{meeting}", store)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(prefixed, rank, world_size, timedelta(seconds=timeout_seconds))

    def broadcast(self, bytes_N: Tensor) -> None:
        """Fill `bytes_N` with rank 0's. RuntimeError when a member is gone, or this one has left."""
        # The result gets no name here: a failure's traceback would keep it, and with it the connections.
        self._begin(bytes_N).wait()

    def _begin(self, bytes_N: Tensor) -> Any:
        if (group := self._group) is None:
            raise RuntimeError(LEFT)
        return group.broadcast(bytes_N, 0)

    def close(self) -> None:
        """Close the connections once the collective under way has failed; members that wait for this one then fail."""
        group, self._group = [self._group], None
        threading.Thread(target=group.clear, name="leave", daemon=True).start()  # a thread: torch's destructor waits
