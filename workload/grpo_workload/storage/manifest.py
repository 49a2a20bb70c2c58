"""`manifest.json` with every file's size and checksum, to tell a whole checkpoint from a damaged one.

CRC-32 runs at the speed of the disk and finds what storage does to files: truncated, zeroed or swapped blocks. It does
not protect against forgery. A file that was just written is in memory, which is read faster than one processor sums up:
so an attempt that begins reads several parts at once.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from grpo_workload.storage.files import sync

FILE_NAME = "manifest.json"
_CHUNK = 2**22  # bytes
PART_BYTES = 2**26
"""Bytes of a part of a file."""
MOST_THREADS = 8
"""Threads that sum up parts, if there are as many processors."""
_POLYNOMIAL = 0xEDB88320  # of CRC-32; the highest bit of a number is the constant term


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a checkpoint."""

    bytes: int
    crc32: int


def describe(path: Path, threads: int = 1) -> Entry:
    """Return the size and checksum of a file, read by so many threads. Raises OSError if it cannot be read."""
    starts = range(0, path.stat().st_size, PART_BYTES)
    size = checksum = 0
    with ThreadPoolExecutor(threads) as pool:
        for part in pool.map(partial(_describe_part, path), starts):
            checksum = joined(checksum, part.crc32, part.bytes)
            size += part.bytes
    return Entry(size, checksum)


def _describe_part(path: Path, start: int) -> Entry:
    size = checksum = 0
    with path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(min(_CHUNK, PART_BYTES - size)):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return Entry(size, checksum)


def joined(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two texts that follow each other, of theirs; `size` is the second's number of bytes.

    It is a remainder of polynomials, so the first text's is multiplied by x once for each bit of the second.
    """
    power, square, bits = 1 << 31, 1 << 30, 8 * size  # x^0, and x^1, x^2, x^4, ...
    while bits:
        if bits & 1:
            power = _times(power, square)
        square, bits = _times(square, square), bits >> 1
    return _times(first, power) ^ second


def _times(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


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
    found, threads = [], min(MOST_THREADS, len(os.sched_getaffinity(0)))
    for name in names:
        expected = entries[name]
        try:
            size = (folder / name).stat().st_size
            if size != expected.bytes:
                found.append(f"{name}: has {size} bytes instead of {expected.bytes}")
            elif describe(folder / name, threads) != expected:
                found.append(f"{name}: its content has changed (CRC-32)")
        except OSError as error:
            found.append(f"{name}: cannot be read: {error.strerror}")
    return found
