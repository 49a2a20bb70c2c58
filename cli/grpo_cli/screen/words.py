"""Numbers and times as short text. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Return a duration as kubectl writes it, with two units at most: 45s, 3m12s, 2h05m, 3d4h."""
    left = max(0, round(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m{left % 60:02d}s"
    if left < 86400:
        return f"{left // 3600}h{left % 3600 // 60:02d}m"
    return f"{left // 86400}d{left % 86400 // 3600}h"


def since(moment: str | None, now: datetime) -> float | None:
    """Return the seconds since a timestamp of the API; None when there is none."""
    return (now - datetime.fromisoformat(moment)).total_seconds() if moment else None


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return values as bars between their minimum and maximum, averaged to `width` bars; unknown values are blank."""
    cuts = (
        [round(len(values) * column / min(width, len(values))) for column in range(min(width, len(values)) + 1)]
        if values
        else [0]
    )
    means = [_scaled_mean(values[first:last]) for first, last in pairwise(cuts)]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)

    def bar(mean: float) -> str:
        return BARS[min(len(BARS) - 1, int((mean - low) / span * len(BARS)))] if span > 0 else BARS[0]

    return "".join(" " if mean is None else bar(mean) for mean in means)


def _scaled_mean(values: Iterable[float | None]) -> float | None:
    """Return a quarter of the mean, so that the difference of two is finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(value / len(known) / 4 for value in known) if known else None


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: 0-3, 5, 7-8."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def some(words: Sequence[str], most: int) -> str:
    """Return the first `most` words, and the number of further ones."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
