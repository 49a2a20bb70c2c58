"""The base of all parts of the status: their base class, and timestamps."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field

from grpo_spec.schema import Section


def _moment(text: str) -> str:
    """Check a timestamp: code that reads a status counts on it. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or not 1970 <= moment.year < 9000:
        raise ValueError("a time with a time zone, such as 2026-01-31T12:00:00Z, would work")
    return text


Time = Annotated[str, Field(max_length=40), AfterValidator(_moment)]
TimeIfKnown = Annotated[str, Field(max_length=40), AfterValidator(lambda text: text and _moment(text))]
"""A time, or an empty text."""


def known_time(text: object) -> str:
    """Return a timestamp that another program wrote, or an empty text if it is none."""
    try:
        return _moment(text[:40]) if isinstance(text, str) else ""
    except ValueError:
        return ""


class StatusSection(Section):
    """A part of the status. Only the operator writes it: the spec bounds the length of lists without a limit."""
