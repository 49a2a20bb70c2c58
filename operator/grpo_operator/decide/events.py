"""Events for people, emitted once for each change of a status that they should notice. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_operator.api.names import Condition
from grpo_operator.api.status import ConditionStatus, GRPOJobStatus, MemberStatus
from grpo_operator.api.times import rfc3339
from grpo_operator.decide import lifecycle
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.conditions import FOR_KSTATUS, holds, is_terminal
from grpo_operator.layout.job import Job
from grpo_spec.reasons import Reason

OBSTACLES = (
    Reason.UNSCHEDULABLE,
    Reason.CONTAINER_WAITING,
    Reason.WAITING_FOR_PEERS,
    Reason.NODE_NOT_READY,
    Reason.POD_STUCK,
    Reason.NAME_TAKEN,
    Reason.QUOTA_EXCEEDED,
    Reason.CHILD_REFUSED,
)
"""Reasons that become a Warning event although their condition is False."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event for people, emitted once."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events_between(old: GRPOJobStatus, new: GRPOJobStatus, job: Job) -> tuple[Event, ...]:
    """Return one event for each condition that became True, each new obstacle and each pod that is being taken away."""
    before = {condition.type: _gist(condition) for condition in old.conditions}
    bad_kinds = (Condition.FAILED, Condition.RESTARTING, Condition.HUNG, Condition.DEGRADED, Condition.BLOCKED)
    events = []
    for condition in new.conditions:
        if condition.type in FOR_KSTATUS or before.get(condition.type) == _gist(condition):
            continue
        if condition.type == Condition.SCHEDULED and holds(new, Condition.RUNNING):
            continue  # that all pods run says it
        obstacle = condition.reason in OBSTACLES or _refuses(condition)
        begins = condition.reason == Reason.SUSPENDING
        if condition.status == "True" or obstacle or begins:
            bad = obstacle or condition.type in bad_kinds
            reason = condition.reason if bad or begins else condition.type
            events.append(Event(type="Warning" if bad else "Normal", reason=reason, message=condition.message))
    known = {member.uid for member in old.members if member.disruption}
    runs = new.attempt == old.attempt and not (is_terminal(new) or is_between_attempts(new))
    for member in lifecycle.leaving(new) if runs else ():
        if member.disruption is not None and member.uid not in known:
            message = lifecycle.describe_leaving(member)
            events.append(Event(type="Warning", reason=member.disruption.reason, message=message))
    replaced = {member.uid for member in old.members if member.replacing}
    for member in new.members if runs else ():
        if member.replacing and member.uid not in replaced:
            events.append(Event(type="Warning", reason=Reason.ENGINE_RESTARTING, message=_replacement(member, new)))
    tries = new.download
    if tries is not None and tries.retry_time is not None and tries != old.download:
        message = f"{tries.message}; tried again at {rfc3339(tries.retry_time)}"
        events.append(Event(type="Warning", reason=Reason.DOWNLOAD_FAILED, message=message))
    if not holds(old, Condition.ACCEPTED) and holds(new, Condition.ACCEPTED) and job.spec.storage.claim_name is None:
        consequence = "checkpoints are lost with the pods, and every new attempt begins at step 0"
        message = f"spec.storage.claimName is not set: {consequence}"
        events.append(Event(type="Warning", reason=Reason.RESTARTS_FROM_STEP_ZERO, message=message))
    return tuple(events)


def _replacement(member: MemberStatus, new: GRPOJobStatus) -> str:
    needed = "the job does not need it" if member.failures else "the trainer waits for it"
    is_avoided = any(node.name == member.node for node in new.avoid_nodes)
    where = f", on other nodes than {member.node} if possible" if is_avoided else ""
    when = f", not before {rfc3339(member.replace_time)}" if member.replace_time else ""
    said = f"only this engine is recreated, and no trainer pod{when}{where}; {needed}"
    return f"{lifecycle.describe_end(member)}; {said}"


def _refuses(condition: ConditionStatus) -> bool:
    return condition.type == Condition.ACCEPTED and condition.status == "False"


def _gist(condition: ConditionStatus) -> tuple[str, str, str]:
    """Return what makes a condition another one for people; of a refusal each new message is."""
    return condition.status, condition.reason, condition.message if _refuses(condition) else ""
