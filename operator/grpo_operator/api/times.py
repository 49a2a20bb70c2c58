"""Times: datetimes in UTC to the operator, RFC 3339 texts to whoever else reads or writes them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

MOST_CHARACTERS = 40

LONG_AGO, NEVER = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
"""Times before and after all others."""


def _read(given: object) -> datetime:
    """Read a time: code that reads a status counts on it. Raises ValueError."""
    if isinstance(given, str):
        given = datetime.fromisoformat(given)
    if not isinstance(given, datetime) or given.tzinfo is None or not 1970 <= given.year < 9000:
        raise ValueError("a time with a time zone, such as 2026-01-31T12:00:00Z, would work")
    return given


def known_time(said: object) -> datetime | None:
    """Read a time that another program wrote; None if it is none."""
    try:
        return _read(said[:MOST_CHARACTERS]) if isinstance(said, str) else None
    except ValueError:
        return None


def rfc3339(time: datetime) -> str:
    """Return a time as objects of Kubernetes and messages have it, such as 2026-01-31T12:00:00Z."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def whole_seconds(time: datetime) -> datetime:
    """Return a time as the status has it: later by less than a second is no news."""
    return time.replace(microsecond=0)


def after(time: datetime, seconds: float) -> datetime:
    """Return the time so many seconds later, in whole seconds."""
    return whole_seconds(time + timedelta(seconds=seconds))


def seconds_between(earlier: datetime, later: datetime) -> float:
    """Return the seconds from one time to another."""
    return (later - earlier).total_seconds()


Time = Annotated[
    datetime,
    PlainValidator(_read),
    PlainSerializer(rfc3339, return_type=str),
    WithJsonSchema({"type": "string", "maxLength": MOST_CHARACTERS}),
]
"""A time of the status, which is a text in JSON."""
