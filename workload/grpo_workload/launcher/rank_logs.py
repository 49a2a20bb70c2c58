"""Copies the lines that ranks write into their logs to the launcher's own output."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TextIO

POLL_SECONDS = 0.1


class LogCopies:
    """Copies of any number of logs, each in a thread of its own."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, log: Path, prefix: str, to: TextIO) -> None:
        """Copy all lines of a log, which exists, with `prefix` before each."""
        thread = threading.Thread(target=self._copy, args=(log, prefix, to), name=f"copy-{log.name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Return when all that was written until now is copied, also a last line without an end."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _copy(self, log: Path, prefix: str, to: TextIO) -> None:
        line = ""
        with log.open(errors="replace") as file:
            while True:
                is_over = self._is_over.is_set()  # before the look: what was written before `finish` is read
                if text := file.readline():
                    line += text
                    if line.endswith("\n"):
                        to.write(prefix + line)
                        line = ""
                    continue
                to.flush()
                if is_over:
                    break
                time.sleep(POLL_SECONDS)
        if line:
            to.write(f"{prefix}{line}\n")
            to.flush()
