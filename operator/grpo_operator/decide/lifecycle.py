"""Ends of an attempt or the job: suspension, deadlines, completion. Pure. `restarts` decides on failures, `attempts`
begins the next attempt.

The intent is written first: before any pod is deleted, `Restarting` holds, or `Suspended` has the reason Suspending; it
holds once no pod is left. That stays so until the next attempt begins, which needs all pods of the job to be gone (like
JobSet's recreation of all its Jobs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from grpo_operator.api.names import Condition, Role
from grpo_operator.api.status import Failure, GRPOJobStatus, MemberStatus
from grpo_operator.api.times import rfc3339, seconds_between
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.conditions import Draft, find, rests
from grpo_operator.decide.observe import Left
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason
from grpo_spec.words import counted, every

IN_STATUS = " (more in status.lastFailure)"
"""Ends a failure's first line where more follow."""

IN_MEMBERS = " (more in status.members)"
"""The same, for a pod that the job does not need."""

_LEFT = "; it waits for "
"""Separates what `Restarting` says from the pods that are left."""


def leaving(status: GRPOJobStatus) -> list[MemberStatus]:
    """Return the pods that the cluster takes or has taken away, without engines that the operator itself replaces."""
    return [member for member in status.members if member.disruption is not None and not member.replacing]


def describe_leaving(member: MemberStatus, others: str = "") -> str:
    """Describe one of `leaving` for people; `others` is put after its node, such as " and 2 more"."""
    assert member.disruption is not None
    return f"pod {member.pod} on node {member.node}{others} is being taken away: {member.disruption.message}"


def suspend(draft: Draft, left: Mapping[str, Left]) -> None:
    """Stop the deadline's clock and set `Suspended`. `left`: see `deletions.find_left`."""
    _rest(draft, "the job is suspended")
    if (accepted := find(draft.status, Condition.ACCEPTED)) is not None and accepted.status == "False":
        # It was refused for something in the cluster, which nobody looks at while the job rests.
        draft.set(
            Condition.ACCEPTED, None, Reason.SUSPENDED, f"checked again when the job is resumed: {accepted.message}"
        )
    stay_suspended(draft, left)


def queue(draft: Draft, left: Mapping[str, Left], why: str) -> None:
    """End the attempt and wait for Kueue, as if suspended. `why`: what Kueue says."""
    _rest(draft, "the job waits in its queue")
    if left:
        draft.set(Condition.SUSPENDED, False, Reason.SUSPENDING, f"{why}; {_saving(left)}")
    else:
        draft.set(Condition.SUSPENDED, True, Reason.QUEUED, why + from_where(draft))


def _rest(draft: Draft, why: str) -> None:
    if not rests(draft.status):
        draft.update(active_seconds=active_seconds(draft.status, draft.now), active_since=None, next_restart_time=None)
        draft.update(placement_timeouts=None)
        draft.clear(Condition.RESTARTING, Reason.SUSPENDED, why)
    draft.update(admission=None)


def wait_for_old(foreign: Sequence[str]) -> str:
    """Say which objects of an earlier job are waited for."""
    return f"waiting until objects of an earlier job of the same name are deleted: {', '.join(foreign[:5])}"


def _saving(left: Mapping[str, Left]) -> str:
    return f"{counted(len(left), 'pod is', 'pods are')} saving and ending: {_named(left)}"


def _named(left: Mapping[str, Left]) -> str:
    named = ", ".join(f"{pod} ({one.why})" if one.why else pod for pod, one in [*left.items()][:8])
    killed = max((one.killed for one in left.values() if one.killed is not None), default=None)
    return named if killed is None else f"{named}; kubelets kill what has not ended by {rfc3339(killed)}"


def stay_suspended(draft: Draft, left: Mapping[str, Left], foreign: Sequence[str] = ()) -> None:
    """Set `Suspended`, which holds once no pod is left; also when the job is to be resumed after.

    `foreign`: what keeps a job that is resumed from beginning.
    """
    if left:
        draft.set(Condition.SUSPENDED, False, Reason.SUSPENDING, _saving(left))
    elif foreign:
        draft.set(Condition.SUSPENDED, False, Reason.WAITING_FOR_OLD_CHILDREN, wait_for_old(foreign))
    else:
        draft.set(Condition.SUSPENDED, True, Reason.SUSPENDED, "no pod is left" + from_where(draft))


def name_left(draft: Draft, left: Mapping[str, Left], foreign: Sequence[str]) -> None:
    """Say in `Restarting` what the next attempt waits for: pods that something keeps, others once its time has come."""
    old, at = find(draft.status, Condition.RESTARTING), draft.status.next_restart_time
    if old is None:
        return
    said = old.message.partition(_LEFT)[0]
    is_time = at is None or seconds_between(at, draft.now) >= 0
    if left and (is_time or any(one.why for one in left.values())):
        pods = counted(len(left), "pod that still ends", "pods that still end")
        said = f"{clip(said, 3072)}{_LEFT}{pods}: {_named(left)}"
    elif foreign and is_time:
        said = f"{clip(said, 3072)}{_LEFT}objects of an earlier job of the same name: {', '.join(foreign[:5])}"
    draft.set(Condition.RESTARTING, True, old.reason, said)


def end(draft: Draft, failure: Failure | None, why: str = "") -> None:
    """End the job: Complete if `failure` is None, else Failed. `why` says which part of the policy ends it."""
    if failure is None:
        trainers = sum(member.role == Role.TRAINER for member in draft.status.members)
        steps = f" after {counted(draft.status.progress.step, 'step')}" if draft.status.progress else ""
        evaluation = draft.status.evaluation
        early = evaluation.why_stopped if evaluation else ""
        where = f"; checkpoint {draft.status.checkpoint}" if draft.status.checkpoint else ""
        message = f"{every(trainers, 'trainer pod', 'trainer pods')} finished{steps}{early}{where}"
        draft.set(Condition.COMPLETE, True, Reason.TRAINING_DONE, message)
    else:
        said = describe(failure) + (f"; {why}" if why else "") + _what_is_left(draft)
        draft.set(Condition.FAILED, True, failure.reason, said)
        draft.update(last_failure=failure)
    for kind in (Condition.RESTARTING, Condition.SUSPENDED, Condition.HUNG):
        draft.clear(kind, Reason.FINISHED, "the job has ended")
    active = active_seconds(draft.status, draft.now)
    draft.update(completion_time=draft.now, next_restart_time=None, active_since=None, active_seconds=active)


def _what_is_left(draft: Draft) -> str:
    """Say how another job goes on from the newest checkpoint, unless it went with its pod."""
    checkpoint = draft.status.checkpoint
    if checkpoint is None or draft.job.spec.storage.claim_name is None:
        return ""
    run = "/".join(checkpoint.split("/")[:3])
    return f"; another job goes on from {checkpoint} with storage.resumeFrom {run}"


def describe(failure: Failure) -> str:
    """Describe a failure in one line."""
    said = first_line(failure.message)
    return said if failure.pod is None else _of_pod(failure, failure.exit_code, said)


def describe_end(member: MemberStatus) -> str:
    """Describe in one line why a pod that has ended, or is being taken away, is replaced."""
    code = member.outcome.exit_code if member.outcome else None
    why = member.disruption or member.outcome
    return _of_pod(member, code, first_line(why.message, IN_MEMBERS) if why else "it has ended")


def _of_pod(one: Failure | MemberStatus, exit_code: int | None, said: str) -> str:
    code = f", exit code {exit_code}" if exit_code is not None and exit_code >= 0 else ""
    return f"{one.role} pod {one.pod} on node {one.node}{code}: {said}"


def first_line(message: str, where: str = IN_STATUS) -> str:
    """Return the first line of a message, and where more of it is."""
    first, _, more = message.partition("\n")
    return first + (where if more else "")


def passed_deadline(draft: Draft) -> Failure | None:
    """Return a failure without a pod if a deadline has passed, else None."""
    spec, status = draft.job.spec, draft.status
    active = active_seconds(status, draft.now)
    if spec.active_deadline_seconds is not None and active >= spec.active_deadline_seconds:
        message = (
            f"the job has been active for {active} s; spec.activeDeadlineSeconds is {spec.active_deadline_seconds}"
        )
        return Failure(reason=Reason.DEADLINE_EXCEEDED, message=message, time=draft.now, attempt=status.attempt or 0)
    since = starting_since(status)
    if since is None or (waited := seconds_between(since, draft.now)) < spec.startup_deadline_seconds:
        return None
    message = f"attempt {status.attempt} is not running after {waited:.0f} s (spec.startupDeadlineSeconds)"
    if status.placement_timeouts is not None:
        message += f", and {counted(status.placement_timeouts.total, 'attempt')} found nodes for only some of the pods"
    message += _obstacle(status)
    return Failure(
        reason=Reason.STARTUP_DEADLINE_EXCEEDED,
        message=clip(message, 4096),
        time=draft.now,
        attempt=status.attempt or 0,
    )


def starting_since(status: GRPOJobStatus) -> datetime | None:
    """Return the time from which startupDeadlineSeconds counts, or None while it does not count."""
    if status.placement_timeouts is not None:
        return status.placement_timeouts.since
    return None if is_between_attempts(status) or status.running_time is not None else status.attempt_start_time


def _obstacle(status: GRPOJobStatus) -> str:
    """Say what keeps the current attempt from running, or ended the last one."""
    if is_between_attempts(status):
        return f"; {describe(status.last_failure)}" if status.last_failure else ""
    kinds = (Condition.SCHEDULED, Condition.RUNNING)
    obstacles = [c for kind in kinds if (c := find(status, kind)) is not None and c.status != "True"]
    return f"; {obstacles[0].reason}: {obstacles[0].message}" if obstacles else ""


def active_seconds(status: GRPOJobStatus, now: datetime) -> int:
    """Return the seconds that the job has been active; suspensions do not count."""
    running = 0.0 if status.active_since is None else max(0.0, seconds_between(status.active_since, now))
    return status.active_seconds + round(running)


def from_where(draft: Draft) -> str:
    """Say where the next attempt continues."""
    if draft.status.attempt is None:
        return ""
    if draft.job.spec.storage.claim_name is None:
        return "; training restarts at step 0 because spec.storage.claimName is not set"
    return f"; training continues from {draft.status.checkpoint}" if draft.status.checkpoint else ""
