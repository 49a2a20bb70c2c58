"""What ends an attempt or the job: failures, suspension, deadlines, completion. Pure. `attempts` begins the next one.

The intent is written first: before any pod is deleted, `Restarting` holds, or `Suspended` has the reason Suspending; it
holds once no pod is left. That stays so until the next attempt begins, which needs all pods of the job to be gone (like
JobSet's recreation of all its Jobs).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from grpo_operator.api.names import Condition, Role, child_name
from grpo_operator.api.status import (
    AvoidedNode,
    Failure,
    GRPOJobStatus,
    MemberStatus,
    PlacementTimeouts,
    Restarts,
)
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.blame import seconds_between
from grpo_operator.decide.conditions import Draft, find, keeps_pods, rests
from grpo_operator.decide.edits import edit
from grpo_operator.decide.failure_policy import Decision, backoff_seconds, decide, halves_micro_batches
from grpo_operator.layout.contracts import smaller_micro_batches
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason

NOT_COUNTED = "this restart does not count towards failurePolicy.maxRestarts"

IN_STATUS = " (more in status.lastFailure)"
"""Ends a failure's first line where more follow."""

_LEFT = "; it waits for "
"""Separates what `Restarting` says from the pods that are left."""

AVOID_SECONDS = 1800
"""Seconds during which new attempts avoid a node that was lost."""


def leaving(status: GRPOJobStatus) -> list[MemberStatus]:
    """Return the pods that the cluster takes or has taken away, without engines that the operator itself replaces."""
    return [member for member in status.members if member.disruption is not None and not member.replacing]


def describe_leaving(member: MemberStatus, others: str = "") -> str:
    """Describe one of `leaving` for people; `others` is put after its node, such as " and 2 more"."""
    assert member.disruption is not None
    return f"pod {member.pod} on node {member.node}{others} is being taken away: {member.disruption.message}"


def suspend(draft: Draft, pods: Iterable[str]) -> None:
    """Stop the deadline's clock and set `Suspended`. `pods`: the names of those that exist."""
    _rest(draft, "the job is suspended")
    stay_suspended(draft, pods)


def queue(draft: Draft, pods: Iterable[str], why: str) -> None:
    """End the attempt and wait for Kueue, as if suspended. `why`: what Kueue says."""
    _rest(draft, "the job waits in its queue")
    if left := sorted(pods):
        draft.set(Condition.SUSPENDED, False, Reason.SUSPENDING, f"{why}; {_saving(left)}")
    else:
        draft.set(Condition.SUSPENDED, True, Reason.QUEUED, why + _from_where(draft))


def _rest(draft: Draft, why: str) -> None:
    if not rests(draft.status):
        draft.update(active_seconds=active_seconds(draft.status, draft.now), active_since=None, next_restart_time=None)
        draft.update(placement_timeouts=None)
        draft.clear(Condition.RESTARTING, Reason.SUSPENDED, why)
    draft.update(admission=None)


def wait_for_old(foreign: Sequence[str]) -> str:
    """Say which objects of an earlier job are waited for."""
    return f"waiting until objects of an earlier job of the same name are deleted: {', '.join(foreign[:5])}"


def _saving(pods: list[str]) -> str:
    return f"{len(pods)} pods are saving and ending: {', '.join(pods[:8])}"


def stay_suspended(draft: Draft, pods: Iterable[str], foreign: Sequence[str] = ()) -> None:
    """Set `Suspended`, which holds once no pod is left; also when the job is to be resumed after.

    `foreign`: what keeps a job that is resumed from beginning.
    """
    left = sorted(pods)
    if left:
        draft.set(Condition.SUSPENDED, False, Reason.SUSPENDING, _saving(left))
    elif foreign:
        draft.set(Condition.SUSPENDED, False, Reason.WAITING_FOR_OLD_CHILDREN, wait_for_old(foreign))
    else:
        draft.set(Condition.SUSPENDED, True, Reason.SUSPENDED, "no pod is left" + _from_where(draft))


def handle_failure(draft: Draft, failure: Failure, *, in_place: bool = False) -> Decision:
    """Apply `failurePolicy` to a failure: end the job, let another attempt follow, or replace one engine.

    `in_place`: the next attempt is to begin in the same pods.
    """
    policy, restarts = draft.job.spec.failure_policy, draft.status.restarts
    halvings = draft.status.micro_batch_halvings
    decision = decide(policy, failure, restarts, halvings)
    draft.update(last_failure=edit(failure, counted=decision.counted))
    if failure.reason == Reason.HUNG:
        draft.set(Condition.HUNG, True, Reason.HUNG, failure.message)
    if decision.action == "Fail":
        end(draft, failure, decision.why)
        return decision
    draft.update(restarts=Restarts(total=restarts.total + 1, counted=restarts.counted + decision.counted))
    if decision.action == "RestartGeneration":
        _replace_engine(draft, failure)
        return decision
    earlier = restarts.counted if decision.counted else 0
    count = f"restart {restarts.counted + 1} of {policy.max_restarts}" if decision.counted else NOT_COUNTED
    if failure.reason == Reason.PLACEMENT_TIMEOUT:
        timeouts = _count_placement_timeout(draft)
        earlier = timeouts.total - 1
        count += f"; {timeouts.total} in a row since {timeouts.since}" if earlier else ""
    at = after(draft.now, backoff_seconds(policy, earlier, draft.job.uid, restarts.total))
    if halves_micro_batches(failure, halvings):
        tokens = smaller_micro_batches(draft.job.spec.training, halvings + 1).max_tokens_per_micro_batch
        count += "; micro-batches are halved" + (f", to {tokens} tokens" if tokens else "")
        draft.update(micro_batch_halvings=halvings + 1)
    draft.update(next_restart_time=at)
    _announce_restart(draft, failure, count, at, in_place=in_place)
    return decision


def _count_placement_timeout(draft: Draft) -> PlacementTimeouts:
    old, began = draft.status.placement_timeouts, draft.status.attempt_start_time or draft.now
    new = PlacementTimeouts(total=old.total + 1 if old else 1, since=old.since if old else began)
    draft.update(placement_timeouts=new)
    return new


def correct_cause(draft: Draft, failure: Failure | None) -> None:
    """Correct the cause while an attempt ends: the peer that it lost turns out to be on a lost node.

    The restart counts as one after a lost node, and only once.
    """
    last = draft.status.last_failure
    if (
        failure is None
        or failure.reason != Reason.NODE_LOST
        or last is None
        or last.reason not in (Reason.PEER_LOST, Reason.PEERS_MISSING)
    ):
        return
    decision = decide(draft.job.spec.failure_policy, failure, Restarts())
    draft.update(last_failure=edit(failure, counted=decision.counted))
    if last.counted and not decision.counted:
        restarts = draft.status.restarts
        draft.update(restarts=Restarts(total=restarts.total, counted=restarts.counted - 1))
    count = "this restart counts towards failurePolicy.maxRestarts" if decision.counted else NOT_COUNTED
    _announce_restart(draft, failure, count, draft.status.next_restart_time)


def _announce_restart(draft: Draft, failure: Failure, count: str, at: str | None, *, in_place: bool = False) -> None:
    where = ", in the same pods" if in_place else _avoid(draft, failure)
    message = f"{describe(failure)}; {count}; next attempt not before {at}{where}{_from_where(draft)}"
    draft.set(Condition.RESTARTING, True, Reason.RESTARTING_IN_PLACE if in_place else Reason.RESTARTING, message)


def recreate(draft: Draft, why: str) -> None:
    """Recreate pods that were to be kept for the next attempt."""
    message = f"the next attempt cannot begin in the same pods: {why}; all pods are recreated{_from_where(draft)}"
    draft.set(Condition.RESTARTING, True, Reason.RESTARTING, message)


def _replace_engine(draft: Draft, failure: Failure) -> None:
    members = tuple(
        edit(member, replacing=True) if member.pod == failure.pod else member for member in draft.status.members
    )
    # The pod's name without its ordinal is its group's StatefulSet. A prefix would also match `gen` for `gen-2`.
    child = (failure.pod or "").rpartition("-")[0]
    groups = tuple(
        edit(group, incarnation=group.incarnation + 1) if child == child_name(draft.job.name, group.name) else group
        for group in draft.status.groups
    )
    draft.update(members=members, groups=groups)


def _avoid(draft: Draft, failure: Failure) -> str:
    """Avoid the node if the failure is its loss; return the words that say so."""
    if failure.reason != Reason.NODE_LOST or failure.node is None:
        return ""
    others = [node for node in draft.status.avoid_nodes if node.name != failure.node]
    lost = AvoidedNode(name=failure.node, until=after(draft.now, AVOID_SECONDS))
    draft.update(avoid_nodes=tuple([*others, lost][-64:]))
    return f", on other nodes than {failure.node} if possible"


def name_left(draft: Draft, pods: Iterable[str]) -> None:
    """Say in `Restarting` which pods the next attempt waits for, once its time has come."""
    old, at, left = find(draft.status, Condition.RESTARTING), draft.status.next_restart_time, sorted(pods)
    if old is None or keeps_pods(draft.status):
        return
    said = old.message.partition(_LEFT)[0]
    if left and (at is None or seconds_between(at, draft.now) >= 0):
        said = f"{clip(said, 3072)}{_LEFT}{len(left)} pods that still end: {', '.join(left[:8])}"
    draft.set(Condition.RESTARTING, True, old.reason, said)


def end(draft: Draft, failure: Failure | None, why: str = "") -> None:
    """End the job: Complete if `failure` is None, else Failed. `why` says which part of the policy ends it."""
    if failure is None:
        trainers = sum(member.role == Role.TRAINER for member in draft.status.members)
        steps = f" after {draft.status.progress.step} steps" if draft.status.progress else ""
        tried = draft.status.evaluation
        early = tried.why_stopped if tried else ""
        where = f"; checkpoint {draft.status.checkpoint}" if draft.status.checkpoint else ""
        message = f"all {trainers} trainer pods finished{steps}{early}{where}"
        draft.set(Condition.COMPLETE, True, Reason.TRAINING_DONE, message)
    else:
        draft.set(Condition.FAILED, True, failure.reason, describe(failure) + (f"; {why}" if why else ""))
        draft.update(last_failure=failure)
    for kind in (Condition.RESTARTING, Condition.SUSPENDED, Condition.HUNG):
        draft.clear(kind, Reason.FINISHED, "the job has ended")
    active = active_seconds(draft.status, draft.now)
    draft.update(completion_time=draft.now, next_restart_time=None, active_since=None, active_seconds=active)


def describe(failure: Failure) -> str:
    """Describe a failure in one line."""
    first, _, more = failure.message.partition("\n")
    hint = IN_STATUS if more else ""
    if failure.pod is None:
        return first + hint
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None and failure.exit_code >= 0 else ""
    return f"{failure.role} pod {failure.pod} on node {failure.node}{code}: {first}{hint}"


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
        message += f", and {status.placement_timeouts.total} attempts found nodes for only some of their pods"
    message += _obstacle(status)
    return Failure(
        reason=Reason.STARTUP_DEADLINE_EXCEEDED,
        message=clip(message, 4096),
        time=draft.now,
        attempt=status.attempt or 0,
    )


def starting_since(status: GRPOJobStatus) -> str | None:
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


def active_seconds(status: GRPOJobStatus, now: str) -> int:
    """Return the seconds that the job has been active; suspensions do not count."""
    running = 0.0 if status.active_since is None else max(0.0, seconds_between(status.active_since, now))
    return status.active_seconds + round(running)


def after(moment: str, seconds: float) -> str:
    """Return the timestamp `seconds` after `moment`."""
    return (datetime.fromisoformat(moment) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _from_where(draft: Draft) -> str:
    """Say where the next attempt continues."""
    if draft.status.attempt is None:
        return ""
    if draft.job.spec.storage.claim_name is None:
        return "; training restarts at step 0 because spec.storage.claimName is not set"
    return f"; training continues from {draft.status.checkpoint}" if draft.status.checkpoint else ""
