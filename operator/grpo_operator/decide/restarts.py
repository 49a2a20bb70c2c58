"""Consequences of a failure: another attempt, another pod for one engine, or the end of the job. Pure.

Every restart goes through `_wait`, so that each waits longer than the one before until the job makes progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from grpo_operator.api.names import Condition, Role, child_name
from grpo_operator.api.placement_status import PlacementTimeouts
from grpo_operator.api.progress_status import DownloadStatus
from grpo_operator.api.status import Failure, MemberOutcome, MemberStatus, RecentRestarts, Restarts
from grpo_operator.api.times import after, rfc3339, seconds_between
from grpo_operator.decide import in_place, nodes, repeats
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.conditions import Draft, find
from grpo_operator.decide.edits import edit
from grpo_operator.decide.failure_policy import Decision, backoff_seconds, decide, halves_micro_batches
from grpo_operator.decide.lifecycle import describe, end, from_where
from grpo_operator.decide.observe import Observed
from grpo_operator.layout.contracts import smaller_micro_batches
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason

NOT_COUNTED = "this restart does not count towards failurePolicy.maxRestarts"


def handle_failure(draft: Draft, failure: Failure, observed: Observed, partners: Collection[str] = ()) -> Decision:
    """Apply `failurePolicy` to a failure of the job: end it, let another attempt follow, or replace one engine.

    `partners`: the other pods of the engine that failed.
    """
    policy, restarts = draft.job.spec.failure_policy, draft.status.restarts
    halvings = draft.status.micro_batch_halvings
    failure = repeats.named_if_repeated(failure, draft.status)
    same = _replaced_with(draft, failure)
    decision = decide(policy, failure, restarts if same is None else Restarts(), halvings)
    if same is not None:  # one incident, which counted at its first engine
        decision = replace(decision, counted=False)
    failure = edit(failure, counted=decision.counted)
    draft.update(last_failure=failure)
    if failure.reason == Reason.HUNG:
        draft.set(Condition.HUNG, True, Reason.HUNG, failure.message)
    if decision.action == "Fail":
        end(draft, failure, decision.why)
        return decision
    at = same or _wait(draft)
    draft.update(restarts=Restarts(total=restarts.total + 1, counted=restarts.counted + decision.counted))
    keeps_pods = decision.action == "RestartAll" and in_place.may_keep(draft, failure, observed)
    avoided = nodes.note_failure(draft, failure, keeps_pods=keeps_pods)
    count = f"restart {restarts.counted + 1} of {policy.max_restarts}" if decision.counted else NOT_COUNTED
    if decision.action == "RestartGeneration":
        _replace_engines(draft, {pod: _Replaced(failure, at) for pod in (failure.pod or "", *partners)}, observed)
        return decision
    if failure.reason == Reason.PLACEMENT_TIMEOUT:
        timeouts = _count_placement_timeout(draft)
        count += f"; {timeouts.total} in a row since {rfc3339(timeouts.since)}" if timeouts.total > 1 else ""
    if halves_micro_batches(failure, halvings):
        tokens = smaller_micro_batches(draft.job.spec.training, halvings + 1).max_tokens_per_micro_batch
        count += "; micro-batches are halved" + (f", to {tokens} tokens" if tokens else "")
        draft.update(micro_batch_halvings=halvings + 1)
    draft.update(next_restart_time=at)
    kept = keeps_pods and not avoided
    _announce_restart(draft, failure, count, at, ", in the same pods" if kept else avoided, in_place=kept)
    return decision


def _replaced_with(draft: Draft, failure: Failure) -> datetime | None:
    """Return when an engine is replaced together with others that wait for it: a node took them all, for example."""
    if failure.role != Role.GENERATION or draft.job.spec.failure_policy.on_generation_failure != "RestartGeneration":
        return None
    waiting = [one.replace_time for one in draft.status.members if one.replacing and not one.failures]
    return max((at for at in waiting if at is not None and not is_due(at, draft.now)), default=None)


def _wait(draft: Draft) -> datetime:
    """Count one more restart since the last progress. Return the time before which it may not begin."""
    status = draft.status
    # A status of a release that did not count these: those that counted have happened.
    old = status.recent_restarts or RecentRestarts(
        total=status.restarts.counted, step=status.progress.step if status.progress else 0
    )
    draft.update(recent_restarts=RecentRestarts(total=old.total + 1, step=old.step))
    policy = draft.job.spec.failure_policy
    return after(draft.now, backoff_seconds(policy, old.total, draft.job.uid, status.restarts.total))


def forget_after_progress(draft: Draft) -> None:
    """Forget earlier restarts once failurePolicy.recoverySteps new steps are done."""
    status, steps = draft.status, draft.job.spec.failure_policy.recovery_steps
    recent, reached = status.recent_restarts, status.progress.step if status.progress else 0
    if recent is None:
        if status.restarts.counted:  # counted by a release that never forgot them: progress counts from here
            draft.update(recent_restarts=RecentRestarts(total=status.restarts.counted, step=reached))
    elif is_between_attempts(status):
        if recent.total == 1:  # the attempt that failed had come further than was known
            draft.update(recent_restarts=edit(recent, step=max(recent.step, reached)))
    elif steps and reached >= recent.step + steps:
        draft.update(recent_restarts=None, restarts=edit(status.restarts, counted=0), failed_nodes=())


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
    failure = edit(failure, counted=decision.counted, step=last.step)
    draft.update(last_failure=failure)
    if last.counted and not decision.counted:
        draft.update(restarts=edit(draft.status.restarts, counted=draft.status.restarts.counted - 1))
    count = "this restart counts towards failurePolicy.maxRestarts" if decision.counted else NOT_COUNTED
    avoided = nodes.note_failure(draft, failure)
    _announce_restart(draft, failure, count, draft.status.next_restart_time or draft.now, avoided)


def _announce_restart(
    draft: Draft, failure: Failure, count: str, at: datetime, where: str, *, in_place: bool = False
) -> None:
    message = f"{describe(failure)}; {count}; next attempt not before {rfc3339(at)}{where}{from_where(draft)}"
    draft.set(Condition.RESTARTING, True, Reason.RESTARTING_IN_PLACE if in_place else Reason.RESTARTING, message)


def recreate(draft: Draft, why: str) -> None:
    """Recreate pods that were to be kept for the next attempt."""
    message = f"the next attempt cannot begin in the same pods: {why}; all pods are recreated{from_where(draft)}"
    draft.set(Condition.RESTARTING, True, Reason.RESTARTING, message)


def replace_spares(draft: Draft, failures: Sequence[Failure], observed: Observed) -> None:
    """Replace the pods of engines that the job does not need: nothing counts, and only the wait of each doubles.

    As for a container of a kubelet, a wait begins again when its engine has run for twice the longest one.
    """
    if not failures:
        return
    policy = draft.job.spec.failure_policy
    members = {member.pod: member for member in draft.status.members}
    long_ago = after(draft.now, -2 * policy.max_backoff_seconds)
    replaced = {}
    for failure in failures:
        member = members[failure.pod or ""]
        earlier = 0 if member.replace_time is None or member.replace_time < long_ago else member.failures
        wait = backoff_seconds(policy, earlier, member.pod + draft.job.uid, earlier)
        nodes.note_failure(draft, failure)
        replaced[member.pod] = _Replaced(failure, after(draft.now, wait), earlier + 1)
    _replace_engines(draft, replaced, observed)


@dataclass(frozen=True, slots=True)
class _Replaced:
    """The cause and the time of an engine's replacement, and its number of failures in a row."""

    failure: Failure
    at: datetime
    failures: int = 0


def _replace_engines(draft: Draft, replaced: Mapping[str, _Replaced], observed: Observed) -> None:
    """Have these pods of engines deleted; their StatefulSets create others, or have created them if they are gone.

    All of them at once: there may be a thousand.
    """
    there = {pod.uid for pod in observed.pods.values()}

    def renewed(one: MemberStatus, how: _Replaced) -> MemberStatus:
        failure = how.failure
        code = -1 if failure.exit_code is None else failure.exit_code
        ended = MemberOutcome(exit_code=code, reason=failure.reason, message=failure.message, finished_at=failure.time)
        return edit(
            one,
            replacing=True,
            replace_time=how.at if one.uid in there else draft.now,
            failures=how.failures,
            outcome=one.outcome or ended,
        )

    members = tuple(
        one if (how := replaced.get(one.pod)) is None else renewed(one, how) for one in draft.status.members
    )
    # The pod's name without its ordinal is its group's StatefulSet. A prefix would also match `gen` for `gen-2`.
    of_groups = Counter(pod.rpartition("-")[0] for pod in replaced)
    groups = tuple(
        edit(group, incarnation=group.incarnation + number)
        if (number := of_groups[child_name(draft.job.name, group.name)])
        else group
        for group in draft.status.groups
    )
    draft.update(members=members, groups=groups)


def follow_download(draft: Draft, failure: Failure | None) -> None:
    """Note how tries of a download end: each waits as restarts do, and none counts. The job ends at the deadline, or at
    once if the hub does not have what is asked for.

    `failure`: how the last try failed; None while one is under way, or is to begin.
    """
    old = draft.status.download or DownloadStatus(since=draft.now)
    if failure is not None and failure.reason == Reason.CONFIG_ERROR:
        end(draft, failure)
        return
    limit = draft.job.spec.cache.prefetch_deadline_seconds
    if seconds_between(old.since, draft.now) >= limit:
        scheduled = find(draft.status, Condition.SCHEDULED)
        why = failure.message if failure else scheduled.message if scheduled else ""
        said = clip(f"not downloaded within {limit} s (cache.prefetchDeadlineSeconds); {why}", 4096)
        last = failure or Failure(reason=Reason.DOWNLOAD_FAILED, message="", time=draft.now)
        end(draft, edit(last, message=said))
    elif failure is None:
        draft.update(download=edit(old, retry_time=None))
    elif old.retry_time is None:
        wait = backoff_seconds(draft.job.spec.failure_policy, old.failures, draft.job.uid, old.failures)
        tries = old.failures + 1
        at = after(draft.now, wait)
        new = DownloadStatus(since=old.since, failures=tries, retry_time=at, message=describe(failure))
        draft.update(download=new)


def is_due(replace_time: datetime | None, now: datetime) -> bool:
    """Whether the wait before a pod is replaced is over."""
    return replace_time is None or seconds_between(replace_time, now) >= 0
