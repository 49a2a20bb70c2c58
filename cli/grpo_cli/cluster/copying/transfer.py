"""Copies files from one folder to another, part by part; what is there already is compared, not copied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

PART_BYTES = 4 << 20
"""Bytes of a request: as many are lost, and sent again, when a connection breaks."""


class Side(Protocol):
    """The part of a folder that a copy needs; see `folder.Folder`, whose methods these are."""

    def kind(self, path: str) -> str: ...
    def look(self, path: str) -> dict[str, Any]: ...
    def digest(self, path: str, offset: int, length: int, *, of_part: bool) -> str: ...
    def read(self, path: str, offset: int, length: int) -> bytes: ...
    def write(self, path: str, offset: int, data: bytes) -> str: ...
    def publish(self, path: str, size: int) -> None: ...


class NotCopiedError(Exception):
    """A file whose bytes are not those of the other side; the text says which."""


def join(folder: str, name: str) -> str:
    """Return a path below a folder, either of which may be empty."""
    return "/".join(part for part in (folder.rstrip("/"), name) if part)


def place(found: Mapping[str, Any], source: str, there: str, target: str) -> str:
    """Return the path that the source gets: a file goes into a folder, of a folder the content does.

    Args:
        found: what `look` says of the source.
        source: its name.
        there: the kind of what is at the target.
        target: its path as given; one that ends with / is a folder.
    """
    is_folder = there == "folder" or target.endswith("/") or not target
    return join(target, source.rstrip("/").rpartition("/")[2]) if found["kind"] == "file" and is_folder else target


def copy(
    source: Side, path: str, target: Side, to: str, done: Callable[[int, bool], None], found: Mapping[str, Any]
) -> None:
    """Copy all files at `path` to `to`; `found` is what `source.look(path)` returned.

    `done` gets the bytes of each part, and whether they were there already. Each part is read again on the target's
    side and compared by its SHA-256, and a file gets its name once it is whole. What a copy that was interrupted left
    there is compared and kept. Raises NotCopiedError, and what the sides raise.
    """
    there = target.look(to)
    for name, size in found["files"].items():
        _copy_file(source, join(path, name), target, join(to, name), size, (there, name), done)


def _copy_file(
    source: Side,
    path: str,
    target: Side,
    to: str,
    size: int,
    known: tuple[Mapping[str, Any], str],
    done: Callable[[int, bool], None],
) -> None:
    there, name = known
    parts = [(offset, min(PART_BYTES, size - offset)) for offset in range(0, size, PART_BYTES)]

    def same(offset: int, length: int, *, of_part: bool) -> bool:
        theirs = target.digest(to, offset, length, of_part=of_part)
        return theirs == source.digest(path, offset, length, of_part=False)

    if there["files"].get(name) == size and all(same(*part, of_part=False) for part in parts):
        done(size, True)
        return
    written = there["parts"].get(name, 0)
    for offset, length in parts or [(0, 0)]:
        is_there = 0 < length <= written - offset and same(offset, length, of_part=True)
        if not is_there:
            data = source.read(path, offset, length)
            if len(data) != length:
                raise NotCopiedError(f"{path} became shorter while it was copied")
            if target.write(to, offset, data) != hashlib.sha256(data).hexdigest():
                raise NotCopiedError(f"{to} does not hold what was written there")
        done(length, is_there)
    target.publish(to, size)
