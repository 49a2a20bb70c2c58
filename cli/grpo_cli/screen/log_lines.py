"""Merge the lines of several pods' logs in order of time. Pure."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_RANK = re.compile(r"^\[rank (\d+)\] ?")


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """A line of a pod's log; `rank` wrote it, None: the launcher or an engine."""

    time: str  # RFC 3339 in UTC with nanoseconds, which sorts as text
    pod: str
    text: str
    rank: int | None = None


def read_line(pod: str, raw: str, after: Line | None = None) -> Line:
    """Parse a line as the kubelet writes it, `<time> <text>`; a line without a time gets that of `after`."""
    time, space, text = raw.partition(" ")
    if not (space and time[:4].isdigit() and "T" in time):
        time, text = (after.time if after else ""), raw
    marked = _RANK.match(text)
    return Line(_fixed(time), pod, text, int(marked[1]) if marked else None)


def merged(logs: Sequence[Iterable[Line]]) -> Iterator[Line]:
    """Merge logs in order of time; the lines of one pod keep their order."""
    return heapq.merge(*logs, key=lambda line: line.time)


def _fixed(time: str) -> str:
    """Add the zeros that the kubelet omits at the end of the fraction, so that times sort as text."""
    whole, _, fraction = time.removesuffix("Z").partition(".")
    return f"{whole}.{fraction:0<9}Z" if whole else ""
