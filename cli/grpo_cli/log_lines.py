"""Lines of several pods' logs as one stream in the order of time. Pure."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_RANK = re.compile(r"^\[rank (\d+)\] ?")


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """A line of a pod's log; `rank` is who wrote it, None for the launcher or an engine."""

    time: str  # RFC 3339 in UTC with nanoseconds, so that it sorts as text
    pod: str
    text: str
    rank: int | None = None


def read_line(pod: str, raw: str, after: Line | None = None) -> Line:
    """A line as the kubelet gives it with timestamps: `<time> <text>`; one without a time has that of the line before it."""
    time, space, text = raw.partition(" ")
    if not (space and time[:4].isdigit() and "T" in time):
        time, text = (after.time if after else ""), raw
    marked = _RANK.match(text)
    return Line(_fixed(time), pod, text, int(marked[1]) if marked else None)


def merged(logs: Sequence[Iterable[Line]]) -> Iterator[Line]:
    """Lines of all logs in the order of time; those of one pod stay in theirs."""
    return heapq.merge(*logs, key=lambda line: line.time)


def _fixed(time: str) -> str:
    """The kubelet leaves out zeros at the end of the fraction; with all of them, times sort as text."""
    whole, _, fraction = time.removesuffix("Z").partition(".")
    return f"{whole}.{fraction:0<9}Z" if whole else ""
