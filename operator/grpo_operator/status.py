"""Conditions, counters and the strings of `kubectl get`: how a status is derived from facts. Pure."""

from __future__ import annotations

from typing import Literal

from grpo_operator.jobstatus import ConditionStatus, GRPOJobStatus, Summary
from grpo_operator.names import Condition, Role
from grpo_operator.topology import Job

_PHASES = {
    Condition.COMPLETE: "Succeeded",
    Condition.FAILED: "Failed",
    Condition.SUSPENDED: "Suspended",
    Condition.RESTARTING: "Restarting",
}
"""Conditions that are a phase when they hold, the strongest first."""


class Draft:
    """A status in the making: every condition set through it carries the job's generation and the time."""

    def __init__(self, status: GRPOJobStatus, job: Job, now: str) -> None:
        self.status, self.job, self.now = status, job, now

    def set(self, kind: Condition, value: bool | None, reason: str, message: str) -> None:
        """Set a condition."""
        self.status = set_condition(self.status, kind, value, reason, message, generation=self.job.generation, now=self.now)

    def clear(self, kind: Condition, reason: str, message: str) -> None:
        """Let a condition no longer hold, if it was ever set."""
        if holds(self.status, kind):
            self.set(kind, False, reason, message)

    def update(self, **fields: object) -> None:
        """Set fields."""
        self.status = self.status.model_copy(update=fields)

    def finish(self) -> GRPOJobStatus:
        """The status, with everything derived."""
        self.update(observed_generation=self.job.generation)
        return summarise(self.status, self.job.spec.generation.topology)


def find(status: GRPOJobStatus, kind: Condition) -> ConditionStatus | None:
    """The condition of a type, if it was ever set."""
    return next((c for c in status.conditions if c.type == kind), None)


def holds(status: GRPOJobStatus, kind: Condition) -> bool:
    """Whether the condition of a type is True."""
    condition = find(status, kind)
    return condition is not None and condition.status == "True"


def is_terminal(status: GRPOJobStatus) -> bool:
    """Whether the job has ended: then nothing but its StatefulSets' scale may still change."""
    return holds(status, Condition.COMPLETE) or holds(status, Condition.FAILED)


def set_condition(
    status: GRPOJobStatus, kind: Condition, value: bool | None, reason: str, message: str, *, generation: int, now: str
) -> GRPOJobStatus:
    """The status with one condition set; its transition time stays while its value does (as JobSet's updateCondition)."""
    words: dict[bool | None, Literal["True", "False", "Unknown"]] = {True: "True", False: "False", None: "Unknown"}
    word = words[value]
    old = find(status, kind)
    new = ConditionStatus(
        type=kind,
        status=word,
        reason=reason,
        message=message[:32768],
        observed_generation=generation,
        last_transition_time=old.last_transition_time if old and old.status == word else now,
    )
    rest = [c for c in status.conditions if c.type != kind]
    order = list(Condition)
    conditions = sorted([*rest, new], key=lambda c: order.index(Condition(c.type)))
    return status.model_copy(update={"conditions": tuple(conditions)})


def summarise(status: GRPOJobStatus, topology: str) -> GRPOJobStatus:
    """The status with its phase and its printer strings, which follow from the rest."""
    phase, telling = _phase(status)
    reason = telling.reason if telling else ""
    if phase == "Restarting" and status.last_failure is not None:
        reason = status.last_failure.reason  # a column that says Restarting twice says nothing
    progress = status.progress
    summary = Summary(
        step=f"{progress.step}/{progress.total_steps}" if progress and progress.total_steps else "",
        reward=f"{progress.reward:.3f}" if progress and progress.reward is not None else "",
        trainer=_ready(status, Role.TRAINER),
        generation=_ready(status, Role.GENERATION) or topology,
        reason=reason,
        message=telling.message if telling else "",
    )
    return status.model_copy(update={"phase": phase, "summary": summary})


def _ready(status: GRPOJobStatus, role: Role) -> str:
    groups = [group for group in status.groups if group.role == role]
    return f"{sum(g.ready for g in groups)}/{sum(g.desired for g in groups)}" if groups else ""


def _phase(status: GRPOJobStatus) -> tuple[str, ConditionStatus | None]:
    """A word for people, and the condition that explains it."""
    accepted = find(status, Condition.ACCEPTED)
    if not is_terminal(status) and accepted is not None and accepted.status == "False":
        return "Invalid", accepted
    for kind, phase in _PHASES.items():
        if holds(status, kind):
            return phase, find(status, kind)
    if accepted is None:
        return "Pending", None
    scheduled = find(status, Condition.SCHEDULED)
    if scheduled is None or scheduled.status != "True":
        return "Pending", scheduled or accepted
    running = find(status, Condition.RUNNING)
    return ("Running" if running and running.status == "True" else "Starting"), running or scheduled
