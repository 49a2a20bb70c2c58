"""Conditions, the phase and the columns of `kubectl get`. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Unpack

from grpo_operator.api.names import Condition, Role
from grpo_operator.api.status import ConditionStatus, GRPOJobStatus, Summary
from grpo_operator.decide.edits import StatusFields, edit
from grpo_operator.layout.job import Job
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason

MESSAGE_BYTES = 4096
"""Longest message of a condition."""

_PHASES = {
    Condition.COMPLETE: "Succeeded",
    Condition.FAILED: "Failed",
    Condition.SUSPENDED: "Suspended",
    Condition.RESTARTING: "Restarting",
}
"""Phase for each condition that is True; the first that matches wins."""

FOR_KSTATUS = (Condition.RECONCILING, Condition.STALLED)
"""Conditions that kstatus (Flux, Helm) reads. They follow from the phase and are absent unless they are True."""

_ON_THE_WAY_TO_REST = (Reason.SUSPENDING, Reason.WAITING_FOR_OLD_CHILDREN)
"""Reasons of a `Suspended` that does not hold yet, or no longer."""

_SPEC_IS_WRONG = (Reason.INVALID_SPEC, Reason.INVALID_POD_TEMPLATE)
"""Reasons of a refusal that ends only when the spec is changed."""


class Draft:
    """A status being edited: each condition set through it carries the job's generation and the time."""

    def __init__(self, status: GRPOJobStatus, job: Job, now: datetime) -> None:
        self.status, self.job, self.now = status, job, now

    def set(self, kind: Condition, value: bool | None, reason: str, message: str) -> None:
        """Set a condition."""
        self.status = set_condition(
            self.status, kind, value, reason, message, generation=self.job.generation, now=self.now
        )

    def clear(self, kind: Condition, reason: str, message: str) -> None:
        """Set a condition to False if it is True, or on its way there."""
        if holds(self.status, kind) or (kind == Condition.SUSPENDED and rests(self.status)):
            self.set(kind, False, reason, message)

    def revert(self, kind: Condition, status: GRPOJobStatus) -> None:
        """Take a condition back to what it was in `status`: set twice in a pass, its time would change in each."""
        if (old := find(status, kind)) is not None:
            kept = tuple(old if one.type == kind else one for one in self.status.conditions)
            self.status = edit(self.status, conditions=kept)

    def update(self, **fields: Unpack[StatusFields]) -> None:
        """Set fields."""
        self.status = edit(self.status, **fields)

    def finish(self) -> GRPOJobStatus:
        """Return the status with its derived fields filled in."""
        return conclude(self.status, self.job.spec.generation.topology, generation=self.job.generation, now=self.now)


def find(status: GRPOJobStatus, kind: Condition) -> ConditionStatus | None:
    """Return the condition of a type, or None if it was never set."""
    return next((c for c in status.conditions if c.type == kind), None)


def holds(status: GRPOJobStatus, kind: Condition) -> bool:
    """Whether the condition of a type is True."""
    condition = find(status, kind)
    return condition is not None and condition.status == "True"


def rests(status: GRPOJobStatus) -> bool:
    """Whether the last attempt was ended because the job is suspended, or waits in its queue, or for what an earlier
    job left. `Suspended` holds only once no pod is left and nothing is waited for; until then its reason says so.
    """
    condition = find(status, Condition.SUSPENDED)
    return condition is not None and (condition.status == "True" or condition.reason in _ON_THE_WAY_TO_REST)


def keeps_pods(status: GRPOJobStatus) -> bool:
    """Whether the next attempt is to begin in the pods of the last one."""
    condition = find(status, Condition.RESTARTING)
    return condition is not None and condition.status == "True" and condition.reason == Reason.RESTARTING_IN_PLACE


def is_terminal(status: GRPOJobStatus) -> bool:
    """Whether the job has ended. After that only the size of its StatefulSets may change."""
    return holds(status, Condition.COMPLETE) or holds(status, Condition.FAILED)


def set_condition(
    status: GRPOJobStatus,
    kind: Condition,
    value: bool | None,
    reason: str,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> GRPOJobStatus:
    """Return the status with one condition set; its lastTransitionTime changes only with its value (as in JobSet)."""
    words: dict[bool | None, Literal["True", "False", "Unknown"]] = {True: "True", False: "False", None: "Unknown"}
    word = words[value]
    old = find(status, kind)
    new = ConditionStatus(
        type=kind,
        status=word,
        reason=reason,
        message=clip(message, MESSAGE_BYTES),
        observed_generation=generation,
        last_transition_time=old.last_transition_time if old and old.status == word else now,
    )
    rest = [c for c in status.conditions if c.type != kind]
    order = [str(known) for known in Condition]  # conditions that another release set come last
    conditions = sorted([*rest, new], key=lambda c: order.index(c.type) if c.type in order else len(order))
    return edit(status, conditions=tuple(conditions))


def conclude(status: GRPOJobStatus, topology: str, *, generation: int, now: datetime) -> GRPOJobStatus:
    """Return the status with what follows from its other fields, at the end of a pass over this generation of the job.

    That is the phase, the strings for `kubectl get` and the conditions for kstatus. A pass decides all conditions, so
    all of them are of this generation.
    """
    status = _summarise(status, topology)
    kind = _for_kstatus(status)
    rest = [condition for condition in status.conditions if condition.type not in FOR_KSTATUS or condition.type == kind]
    status = edit(status, conditions=tuple(rest), observed_generation=generation)
    if kind is not None:
        reason, message = status.summary.reason or status.phase, status.summary.message[:1024]
        status = set_condition(status, kind, True, reason, message, generation=generation, now=now)
    return edit(status, conditions=tuple(edit(c, observed_generation=generation) for c in status.conditions))


def _for_kstatus(status: GRPOJobStatus) -> Condition | None:
    """Return the condition that kstatus is to find: as for a Job, none means that the job runs, rests or is done."""
    reason = status.summary.reason
    if status.phase == "Failed" or (status.phase == "Invalid" and reason in _SPEC_IS_WRONG):
        return Condition.STALLED
    if holds(status, Condition.BLOCKED):
        return Condition.RECONCILING
    if status.phase in ("Running", "Succeeded") or (status.phase == "Suspended" and reason == Reason.SUSPENDED):
        return None
    return Condition.RECONCILING


def _summarise(status: GRPOJobStatus, topology: str) -> GRPOJobStatus:
    phase, explaining = _phase(status)
    reason = explaining.reason if explaining else ""
    if reason in (Reason.RESTARTING, Reason.RESTARTING_IN_PLACE) and status.last_failure is not None:
        reason = status.last_failure.reason  # the condition's own reason says no more than the phase
    progress, evaluation = status.progress, status.evaluation
    best = evaluation.best_metric if evaluation else None
    summary = Summary(
        step=clip(f"{progress.step}/{progress.total_steps}", 32) if progress and progress.total_steps else "",
        reward=_short(progress.reward) if progress and progress.reward is not None else "",
        best=f"{_short(best)}@{evaluation.best_step}" if evaluation and best is not None else "",
        trainer=_ready(status, Role.TRAINER),
        generation=_ready(status, Role.GENERATION) or topology,
        environments=_ready(status, Role.ENVIRONMENT),
        reason=reason,
        message=explaining.message if explaining else "",
    )
    return edit(status, phase=phase, summary=summary)


def _short(number: float) -> str:
    return f"{number:.3f}" if abs(number) < 1e9 else f"{number:.3g}"


def _ready(status: GRPOJobStatus, role: Role) -> str:
    groups = [group for group in status.groups if group.role == role]
    return clip(f"{sum(g.ready for g in groups)}/{sum(g.desired for g in groups)}", 32) if groups else ""


def _phase(status: GRPOJobStatus) -> tuple[str, ConditionStatus | None]:
    """Return the phase and the condition that explains it."""
    blocked = find(status, Condition.BLOCKED) if holds(status, Condition.BLOCKED) else None
    accepted = find(status, Condition.ACCEPTED)
    if not is_terminal(status) and accepted is not None and accepted.status == "False":
        return "Invalid", accepted
    for kind, phase in _PHASES.items():
        if holds(status, kind) or (kind == Condition.SUSPENDED and rests(status)):
            cause = find(status, kind)
            waits = cause is not None and cause.reason == Reason.QUEUED
            return "Pending" if waits else phase, (None if is_terminal(status) else blocked) or cause
    scheduled = find(status, Condition.SCHEDULED)
    if scheduled is None or scheduled.status != "True":
        return "Pending", blocked or scheduled or accepted
    running = find(status, Condition.RUNNING)
    return ("Running" if running and running.status == "True" else "Starting"), blocked or running or scheduled
