"""Conditions, counters and the strings of `kubectl get`: how a status is derived from facts. Pure."""

from __future__ import annotations

from typing import Literal

from grpo_operator.jobstatus import ConditionStatus, GRPOJobStatus, Summary
from grpo_operator.names import Condition, Role

_PHASES = {Condition.COMPLETE: "Succeeded", Condition.FAILED: "Failed"}


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
    progress = status.progress
    summary = Summary(
        step=f"{progress.step}/{progress.total_steps}" if progress and progress.total_steps else "",
        reward=f"{progress.reward:.3f}" if progress and progress.reward is not None else "",
        trainer=_ready(status, Role.TRAINER),
        generation=_ready(status, Role.GENERATION) or topology,
        reason=telling.reason if telling else "",
        message=telling.message if telling else "",
    )
    return status.model_copy(update={"phase": phase, "summary": summary})


def _ready(status: GRPOJobStatus, role: Role) -> str:
    groups = [group for group in status.groups if group.role == role]
    return f"{sum(g.ready for g in groups)}/{sum(g.desired for g in groups)}" if groups else ""


def _phase(status: GRPOJobStatus) -> tuple[str, ConditionStatus | None]:
    """A word for people, and the condition that explains it."""
    for kind, phase in _PHASES.items():
        if holds(status, kind):
            return phase, find(status, kind)
    accepted = find(status, Condition.ACCEPTED)
    if accepted is None or accepted.status != "True":
        return ("Invalid" if accepted and accepted.status == "False" else "Pending"), accepted
    scheduled = find(status, Condition.SCHEDULED)
    if scheduled is None or scheduled.status != "True":
        return "Pending", scheduled or accepted
    running = find(status, Condition.RUNNING)
    return ("Running" if running and running.status == "True" else "Starting"), running or scheduled
