"""Files that others are to read."""

from __future__ import annotations

from pathlib import Path


def make_readable(folder: Path) -> None:
    """Let every user read the files of `folder`: safetensors makes its own for their owner alone, and pods run as different users."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
