"""A rank's thread that writes copies of checkpoints, and deletes old ones, while training goes on.

It works on host memory and files only: it uses no GPU, and takes part in no collective.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import torch

from grpo_workload.storage.staging import Staging

_CHUNK = 2**26  # bytes written between two looks at whether to end


class Background:
    """The thread, and the host memory of its copies."""

    def __init__(self, device: torch.device) -> None:
        """Start with no memory; `device` holds what is copied."""
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.staging = Staging(device, self.thread)
        self.has_ended = False

    def end(self) -> None:
        """End the thread. What it is writing stays incomplete, so that a rank that failed does not wait for it."""
        self.has_ended = True
        self.thread.shutdown(cancel_futures=True)

    def file(self, file: IO[bytes]) -> Any:
        """Return `file` for torch.save, which raises an error once the thread is to end."""
        return EndingFile(file, self)


class EndingFile:
    """A file that writes in pieces."""

    def __init__(self, file: IO[bytes], background: Background) -> None:
        self._file, self._background = file, background

    def write(self, data: memoryview) -> int:
        """Write all of `data`. Raises RuntimeError if the thread is to end."""
        data = memoryview(data)
        for start in range(0, len(data), _CHUNK):
            if self._background.has_ended:
                raise RuntimeError("the rank ended before the checkpoint was written")
            self._file.write(data[start : start + _CHUNK])
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is closed when it is complete."""
