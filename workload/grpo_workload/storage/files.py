"""Helpers for files that others read, now or after a crash."""

from __future__ import annotations

import os
from pathlib import Path

READABLE = 0o644
"""Mode of a file that every user may read."""


class StorageError(RuntimeError):
    """The storage cannot hold what has to be written."""


def make_readable(folder: Path) -> None:
    """Let every user read the files in `folder`: safetensors lets only the owner, and pods run as different users."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(READABLE)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
