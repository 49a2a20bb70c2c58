"""Finds the answer in a completion by a regular expression."""

from __future__ import annotations

import re

from grpo_workload.spec.errors import ConfigError


def compiled(field: str, pattern: str, *, groups: int | None = None) -> re.Pattern[str]:
    """Return the regular expression. ConfigError if it is none, or has another number of groups."""
    try:
        made = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{field}: {pattern!r} is no regular expression of Python: {error}") from error
    if groups not in (None, made.groups):
        raise ConfigError(f"{field}: {pattern!r} has {made.groups} groups; {groups} would work: (?:...) makes no group")
    return made


def last_answer(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Return the last match of the pattern's group; the whole text without a pattern; None if there is no match."""
    return text if pattern is None else next(reversed(pattern.findall(text)), None)
