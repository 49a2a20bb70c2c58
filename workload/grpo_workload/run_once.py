"""Run once, then hold: what a pod of a StatefulSet remembers over restarts of its container.

The kubelet restarts a container whatever its exit code, so that the launcher marks the epoch before it starts anything and keeps the
outcome beside the mark, on a volume that outlives the container.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpo_workload.contract import Contract, ExitCode, Outcome


class PodState(Protocol):
    """What a pod of any role knows of itself."""

    @property
    def contract(self) -> Contract: ...
    @property
    def pod(self) -> str: ...
    @property
    def pod_uid(self) -> str: ...
    @property
    def state_dir(self) -> Path: ...
    @property
    def termination_log(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class RunOnce:
    """The mark and the result of one epoch."""

    place: PodState

    @property
    def _dir(self) -> Path:
        return self.place.state_dir / f"epoch-{self.place.contract.epoch}"

    @property
    def begun(self) -> bool:
        """Whether a launcher of this epoch has started before."""
        return (self._dir / "started").exists()

    @property
    def result(self) -> Outcome | None:
        """How the epoch ended in this pod, if it has."""
        path = self._dir / "result.json"
        return Outcome.model_validate_json(path.read_text()) if path.exists() else None

    def begin(self) -> None:
        """Mark the epoch; from here on nothing of it is started again."""
        self._dir.mkdir(parents=True, exist_ok=True)
        (self._dir / "started").touch(exist_ok=False)

    def finish(self, outcome: Outcome) -> None:
        """Keep the outcome, and tell the kubelet."""
        fresh = self._dir / "result.tmp"
        fresh.write_text(outcome.model_dump_json(by_alias=True, exclude_none=True))
        fresh.replace(self._dir / "result.json")
        self.tell(outcome)

    def tell(self, outcome: Outcome) -> None:
        """Write the outcome as the container's termination message."""
        self.place.termination_log.write_text(outcome.to_message())


def launcher_died(place: PodState) -> Outcome:
    """The outcome of an epoch that was begun by a launcher which left no result."""
    return Outcome(
        epoch=place.contract.epoch,
        pod_uid=place.pod_uid,
        exit_code=ExitCode.RANK_FAILED,
        reason="LauncherDied",
        message=f"pod {place.pod}: the container was ended from outside before it could record an outcome; probably it ran out "
        "of memory: raise resources.limits.memory, or use more pods with fewer ranks each",
    )
