"""The interface of what a page shows: a run's folder, or a job in a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_cli.ui.history import History
from grpo_operator.layout.job import Job


class SourceError(Exception):
    """A source cannot be read now; the text says why, and what to do."""


@dataclass(slots=True)
class Shown:
    """The last answer of a source."""

    title: str
    where: str
    history: History = field(default_factory=History)
    job: dict[str, Any] | None = None  # `grpo_cli.screen.view.JobView` with conditions and pods, as JSON
    to_plan: Job | None = None  # None where no job is known, or its spec is invalid
    changed: float | None = None  # time of the newest step in seconds since 1970, if known
    note: str = ""  # why something is missing
    logs: dict[str, str] = field(default_factory=dict)  # ends of pods' logs, by pod, where they are kept


class Source(Protocol):
    """A run's folder, or a job."""

    @property
    def shown(self) -> Shown:
        """The last that `refresh` has read."""
        ...

    def refresh(self) -> None:
        """Read again; blocks. Raises SourceError, and then leaves `shown` as it was."""
        ...
