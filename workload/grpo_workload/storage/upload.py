"""Copy one export to object storage: `python -m grpo_workload.storage.upload URL [FOLDER]`.

A process of its own, so that it can be given up after a while and takes no time from the rank that trains. Arrow has
the clients, and reads the usual variables of each storage. Without FOLDER a small object is written, as a check.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyarrow.fs import FileSystem, FileType, LocalFileSystem, copy_files

from grpo_workload.storage.manifest import FILE_NAME

PROBE = "write-check"
"""Object that is written before training begins, next to the exports."""


def upload(folder: Path, url: str) -> None:
    """Copy the files of `folder` below `url`, unless they are there; the manifest comes last, and says that all are.

    Raises OSError with what the storage says.
    """
    storage, target = FileSystem.from_uri(url)
    manifest, theirs = (folder / FILE_NAME).read_bytes(), f"{target}/{FILE_NAME}"
    if storage.get_file_info(theirs).type is FileType.File:
        if storage.open_input_stream(theirs).read() == manifest:
            return
        _write(storage, theirs, b"")  # an earlier export of this step, with weights that were lost
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        if file.is_file() and name != FILE_NAME:
            copy_files(str(file), f"{target}/{name}", LocalFileSystem(), storage)
    _write(storage, theirs, manifest)


def probe(url: str) -> None:
    """Write a small object below `url`. Raises OSError with what the storage says."""
    storage, target = FileSystem.from_uri(url)
    _write(storage, f"{target}/{PROBE}", b"written before training begins\n")


def _write(storage: FileSystem, path: str, content: bytes) -> None:
    with storage.open_output_stream(path) as stream:
        stream.write(content)


if __name__ == "__main__":
    to, *folders = sys.argv[1:]
    try:
        upload(Path(folders[0]), to) if folders else probe(to)
    except (OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
