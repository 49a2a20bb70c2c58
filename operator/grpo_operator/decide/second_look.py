"""Plans that need a second, live look before they are carried out, and statuses that may be written a little later.

Pure. A plan is first made from the mirror, which may be behind the API server.
"""

from __future__ import annotations

from enum import Enum, auto

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus, Summary
from grpo_operator.decide.conditions import FOR_KSTATUS, find, holds, is_terminal, keeps_pods, rests
from grpo_operator.decide.edits import edit
from grpo_operator.decide.plan import Plan
from grpo_spec.reasons import Reason


def changes_course(old: GRPOJobStatus, decided: Plan) -> bool:
    """Whether a plan ends an attempt or the job, begins a further attempt, counts a failure, or deletes something.

    What was seen must be true then: such a plan is made again from a live read. Before its first attempt a job has no
    pods, so what was seen is the job itself, and it is written only if it is still the same. Where many jobs start at
    once, a list of each one's pods, for which the API server looks at all pods of the namespace, would cost more than
    anything else. Only one that waited for objects of an earlier job may have that one's pods beside it.
    """
    if decided.deletions or decided.delete_job:
        return True
    if old.attempt is None and decided.status.attempt is not None:
        scheduled = find(old, Condition.SCHEDULED)
        return scheduled is not None and scheduled.reason == Reason.WAITING_FOR_OLD_CHILDREN
    return old.attempt is not None and _course(decided.status) != _course(old)


def _course(status: GRPOJobStatus) -> tuple[object, ...]:
    return (
        status.attempt,
        status.restarts,
        status.last_failure,
        status.micro_batch_halvings,
        is_terminal(status),
        rests(status),
        holds(status, Condition.RESTARTING),
        keeps_pods(status),
    )


_OF_PODS = (Condition.SCHEDULED, Condition.RUNNING)
_OBSTACLES = (Reason.UNSCHEDULABLE, Reason.QUOTA_EXCEEDED, Reason.CHILD_REFUSED, Reason.NAME_TAKEN)
_ON_THE_WAY = ("Pending", "Starting")
"""Phases in which the pods of an attempt have not all started."""


class News(Enum):
    """News of a status that the stored one does not have."""

    URGENT = auto()
    """It is written at once."""
    PROGRESS = auto()
    """The progress of training; pods say so as well, to whoever asks them."""
    DETAILS = auto()
    """The way of an attempt's pods to running, or the number of them that run: which exist, where, how
    many are ready, and the words that say so."""


def news(old: GRPOJobStatus, new: GRPOJobStatus) -> News:
    """Return how urgent it is to write a status that differs from the stored one.

    How a pod ended, or that it is being taken away, cannot wait: it can be seen only for a moment. That the scheduler
    finds no node, or that the cluster refuses a pod, cannot either: a user should read it at once, and the time that
    others hold GPUs in vain begins. Nor can an attempt's first progress, or another warning of its training.
    """
    if _holds_in_vain(old) != _holds_in_vain(new):
        return News.URGENT
    before, after = _without_details(old), _without_details(new)
    if before == after:
        return News.DETAILS
    goes_on = old.progress is not None and new.progress is not None and _warning(old) == _warning(new)
    return News.PROGRESS if goes_on and _without_progress(before) == _without_progress(after) else News.URGENT


def _warning(status: GRPOJobStatus) -> str | None:
    degraded = find(status, Condition.DEGRADED)
    return degraded.reason if degraded is not None and degraded.status == "True" else None


def _without_progress(status: GRPOJobStatus) -> GRPOJobStatus:
    conditions = tuple(c for c in status.conditions if c.type != Condition.DEGRADED)
    return edit(status, conditions=conditions, progress=None, evaluation=None, checkpoint=None)


def _holds_in_vain(status: GRPOJobStatus) -> tuple[str, bool]:
    """Return why a pod has no node and may never have one, "" if nothing is known; and whether others have one then."""
    said = next((c.reason for c in status.conditions if c.type == Condition.SCHEDULED), "")
    obstacle = said if said in _OBSTACLES else ""
    return obstacle, bool(obstacle) and status.placement is not None


def _without_details(status: GRPOJobStatus) -> GRPOJobStatus:
    derived = (*_OF_PODS, *FOR_KSTATUS)
    conditions = tuple(edit(c, message="") for c in status.conditions if c.type not in derived)
    members = tuple(m for m in status.members if m.outcome or m.disruption or m.replacing)
    groups = tuple(edit(group, ready=0) for group in status.groups)
    return edit(
        status,
        phase="Pending" if status.phase in _ON_THE_WAY else status.phase,
        conditions=conditions,
        members=members,
        groups=groups,
        elastic=None,
        usage=None,
        placement=None,
        summary=Summary(),
    )
