"""Finds the answer in a completion by a regular expression."""

from __future__ import annotations

import re


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a `Pattern` of the spec, in which a dot also matches line ends."""
    return re.compile(pattern, re.DOTALL)


def last_answer(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Return the last match of the pattern's group; the whole text without a pattern; None if there is no match."""
    return text if pattern is None else next(reversed(pattern.findall(text)), None)
