"""What a page shows: the interface of a run's folder and of a job in a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_cli.ui.history import History


class SourceError(Exception):
    """There is nothing to read right now; the text says why, and what to do."""


@dataclass(slots=True)
class Shown:
    """All that is known, as of the last time that the source answered."""

    title: str
    where: str
    history: History = field(default_factory=History)
    job: dict[str, Any] | None = None  # `grpo_cli.view.JobView` with conditions and pods, as JSON
    changed: float | None = None  # when the newest step was written, in seconds since the epoch, where that is known
    note: str = ""  # why there is less than there could be


class Source(Protocol):
    """A run's folder or a job."""

    @property
    def shown(self) -> Shown:
        """What `refresh` has found so far."""
        ...

    def refresh(self) -> None:
        """Look again; blocks. Raises SourceError, and then `shown` stays as it was."""
        ...
