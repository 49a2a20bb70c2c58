"""A run's folder as a source: each file is read on from where the last reading ended."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_cli.ui.history import Row
from grpo_cli.ui.source import Shown, SourceError
from grpo_spec.reports import LOGS_FOLDER, RUN_FILES

MAX_BYTES = 256 << 20
"""Bytes read of a file at most, from its end; a step takes about 3 kB."""


class FolderSource:
    """`metrics.jsonl`, `ranks.jsonl` and `completions.jsonl` of a run."""

    def __init__(self, folder: Path) -> None:
        self.shown = Shown(title=_title(folder), where=str(folder))
        self._tails = {name: _Tail(folder / f"{name}.jsonl") for name in RUN_FILES}
        self._folder = folder

    def refresh(self) -> None:
        """Implement `Source.refresh`."""
        if not self._folder.is_dir():
            raise SourceError(f"folder {self._folder} does not exist: was it moved, or is its volume not mounted?")
        try:
            if any(
                [tail.is_rewritten() for tail in self._tails.values()]
            ):  # a list: every tail must check its own file
                self.shown.history.clear()
                self._tails = {name: _Tail(tail.path) for name, tail in self._tails.items()}
            self.shown.history.add({name: tail.read() for name, tail in self._tails.items()})
            self.shown.logs = kept_logs(self._folder)
        except (OSError, ValueError) as error:
            raise SourceError(f"the run's files cannot be read: {error}") from error
        metrics = self._tails["metrics"].path
        self.shown.changed = metrics.stat().st_mtime if metrics.exists() else None
        self.shown.note = (
            "" if self.shown.history.metrics else "no step has finished yet: metrics.jsonl is empty or missing"
        )


def kept_logs(folder: Path) -> dict[str, str]:
    """Return the ends of logs that a run's folder has, by pod."""
    files = sorted((folder / LOGS_FOLDER).glob("*.log"))
    return {file.stem: file.read_text(errors="replace") for file in files if not file.name.startswith(".")}


def run_folder(folder: Path) -> Path:
    """Return `folder`, or the newest run in it. Raises SourceError when the folder does not exist."""
    if (folder / "metrics.jsonl").exists():
        return folder
    runs = sorted(folder.glob("**/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    if runs:
        return runs[-1].parent
    if not folder.is_dir():
        raise SourceError(f"folder {folder} does not exist: give the folder of a run, or one above it")
    return folder  # the folder of a run that has just started


def _title(folder: Path) -> str:
    # <namespace>/<name>/<uid>
    parts = folder.resolve().parts
    return "/".join(parts[-3:-1]) if len(parts) > 3 and len(parts[-1]) == 36 else folder.resolve().name


class _Tail:
    """Reads each line of one file once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0

    def is_rewritten(self) -> bool:
        """Whether the file was replaced or cut: an attempt that continues from a checkpoint rewrites it."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        return self._offset > 0 and (found.st_ino != self._inode or found.st_size < self._offset)

    def read(self) -> list[Row]:
        """Return the rows that were completed since the last reading."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            end = file.seek(0, 2)
            cut = end - self._offset > MAX_BYTES
            self._offset = end - MAX_BYTES if cut else self._offset
            self._inode = self.path.stat().st_ino
            file.seek(self._offset)
            text = file.read(MAX_BYTES)
        whole = text[: text.rfind(b"\n") + 1]  # the last line may still be incomplete
        self._offset += len(whole)
        return [json.loads(line) for line in whole.split(b"\n")[1 if cut else 0 : -1]]
