"""`manifest.json` with every file's size and checksum, to tell a whole checkpoint from a damaged one.

CRC-32 runs at the speed of the disk and finds what storage does to files: truncated, zeroed or swapped blocks. It does
not protect against forgery.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_workload.storage.files import sync

FILE_NAME = "manifest.json"
_CHUNK = 2**22  # bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a checkpoint."""

    bytes: int
    crc32: int


def describe(path: Path) -> Entry:
    """Return the size and checksum of a file. Raises OSError if it cannot be read."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return Entry(size, checksum)


def seal(path: Path) -> Entry:
    """Wait until a file that was just written is on the disk, and describe it."""
    sync(path)
    return describe(path)


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the manifest of `folder`; the keys of `entries` are paths relative to it."""
    path = folder / FILE_NAME
    path.write_text(json.dumps({"files": {name: asdict(entry) for name, entry in sorted(entries.items())}}, indent=1))
    sync(path)


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Return the entries by path relative to `folder`. Raises ValueError if the manifest is missing or damaged."""
    try:
        return {name: Entry(**entry) for name, entry in json.loads((folder / FILE_NAME).read_bytes())["files"].items()}
    except OSError as error:
        raise ValueError(f"{FILE_NAME} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{FILE_NAME} is damaged: {error!r}") from error


def faults(folder: Path, entries: Mapping[str, Entry], names: Iterable[str]) -> list[str]:
    """Return what is wrong with the files `names` of `folder`, each as "file: fault"; empty if nothing is."""
    found = []
    for name in names:
        expected = entries[name]
        try:
            size = (folder / name).stat().st_size
            if size != expected.bytes:
                found.append(f"{name}: has {size} bytes instead of {expected.bytes}")
            elif describe(folder / name) != expected:
                found.append(f"{name}: its content has changed (CRC-32)")
        except OSError as error:
            found.append(f"{name}: cannot be read: {error.strerror}")
    return found
