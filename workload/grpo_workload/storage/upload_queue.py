"""Exports on their way to object storage, one at a time, while training goes on.

Nothing is kept about what was uploaded: an attempt that starts looks at all exports of its run again, and each upload
begins by asking the storage for the manifest.
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from grpo_spec.errors import ConfigError
from grpo_spec.object_storage import CREDENTIALS, REFUSED
from grpo_workload.storage.checkpoint_folder import checkpoints
from grpo_workload.storage.files import StorageError

FIELD = "storage.export.uploadTo"
PROGRAM = "grpo_workload.storage.upload"
UPLOAD_SECONDS = 3600.0
"""Time for one export; it is begun again after that."""
PROBE_SECONDS = 60.0
TRIES = 5
"""Number of times in a row that an upload may fail at the end of the run."""
BACKOFF_SECONDS = 300.0
"""Longest wait after a failure; the first is a second, and each later one twice as long."""
logger = logging.getLogger(__name__)


class UploadQueue:
    """The exports of one run that wait for their upload, on rank 0."""

    def __init__(self, folder: Path, url: str) -> None:
        """Take the exports in `folder` to `url`, each into a folder of its name.

        Raises:
            ConfigError: the storage refuses to be written to; names the field.
            StorageError: it could not be written to, perhaps for now.
        """
        self._folder, self._url = folder, url.rstrip("/")
        self._pending = [path.name for path in reversed(checkpoints(folder))]
        self._process: subprocess.Popen[str] | None = None
        self._began = self._not_before = 0.0
        self._failures, self._why = 0, ""
        self._probe()
        atexit.register(self._give_up)

    @property
    def is_pending(self) -> bool:
        """Whether an export is not uploaded yet."""
        return bool(self._pending)

    def add(self, name: str) -> None:
        """Upload the export of this name after those that wait; it has just been published."""
        self._pending.append(name)
        self.turn()

    def turn(self) -> None:
        """Begin the next upload, or see how the one that runs has ended; returns at once. Call it now and then."""
        if self._process is not None:
            if self._process.poll() is None and time.monotonic() < self._began + UPLOAD_SECONDS:
                return
            self._end(self._process)
        while self._pending and not (self._folder / self._pending[0]).exists():
            logger.warning("%s: %s was not uploaded: it went by storage.export.keep", FIELD, self._pending.pop(0))
        if self._pending and time.monotonic() >= self._not_before:
            name = self._pending[0]
            self._process = self._start(f"{self._url}/{name}", str(self._folder / name))
            self._began = time.monotonic()

    def finish(self, waits: Callable[[], bool]) -> bool:
        """Wait until all exports are uploaded; return False if `waits`, called now and then, says to stop before.

        Raises StorageError if the storage still fails.
        """
        self._failures, self._not_before = 0, 0.0
        while self._pending:
            self.turn()
            if self._failures >= TRIES:
                raise StorageError(
                    f"{FIELD}: {', '.join(self._pending)} could not be uploaded to {self._url}: {self._why}. They are "
                    "in the run's folder; the next attempt tries again"
                )
            if not waits():
                return False
            time.sleep(0.1)
        return True

    def _give_up(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _end(self, process: subprocess.Popen[str]) -> None:
        late = process.poll() is None
        process.kill()
        said = process.communicate()[1].strip()
        self._process = None
        if process.returncode == 0 and not late:
            logger.info("%s: uploaded %s", FIELD, self._pending[0])
            self._pending.pop(0)
            self._failures = 0
            return
        self._why = f"not done within {UPLOAD_SECONDS:.0f} s" if late else said or f"exit code {process.returncode}"
        wait = min(2.0**self._failures, BACKOFF_SECONDS)
        self._failures += 1
        self._not_before = time.monotonic() + wait
        logger.warning("%s: %s: %s; again in %.0f s", FIELD, self._pending[0], self._why, wait)

    def _probe(self) -> None:
        process = self._start(self._url)
        try:
            said = process.communicate(timeout=PROBE_SECONDS)[1].strip()
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"no answer within {PROBE_SECONDS:.0f} s; {process.communicate()[1].strip()}"
        if process.returncode == 0:
            return
        message = f"{FIELD}: cannot write to {self._url}: {said}. {CREDENTIALS}"
        raise ConfigError(message) if REFUSED.search(said) else StorageError(message)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", PROGRAM, *arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
