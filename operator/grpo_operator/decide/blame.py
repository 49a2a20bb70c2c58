"""Find the root cause: of all the pods that ended, the one failure that ended the attempt. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime

from grpo_operator.api.failure_policy import FailurePolicy
from grpo_operator.api.names import Role
from grpo_operator.api.status import Failure, GRPOJobStatus, MemberOutcome, MemberStatus
from grpo_operator.api.times import NEVER, rfc3339, seconds_between
from grpo_operator.decide.edits import edit
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.topology import Topology
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Progress

CULPRIT_SECONDS = 5
"""Wait this long for the root cause before blaming a secondary failure: the outcome of the pod that failed first may be
seen later."""

SILENT_CULPRIT_SECONDS = 45
"""Wait this long instead while a pod has no outcome: its node may be lost, which the cluster notices after 40 s
(node-monitor-grace-period)."""

HANG_FACTOR = 10
"""No new step for this many median steps is a hang, if that is longer than failurePolicy.hangSeconds."""

EFFECTS = frozenset({ExitCode.PEER_LOST, ExitCode.STOPPED})
"""Exit codes of pods that ended only because another pod failed or was stopped."""

Reports = Mapping[str, Progress]
"""The progress that launchers just reported, by pod; a launcher that did not answer is missing."""


def find_failure(
    status: GRPOJobStatus, topology: Topology, observed: Observed, policy: FailurePolicy, now: datetime
) -> Failure | None:
    """Return the failure that most likely caused the others, or None. Pods that the job does not need cause none.

    Pods that the cluster took away come first and secondary failures (EFFECTS) last. Otherwise the one
    that the operator saw first: the clocks of nodes differ.
    """
    needed = {name: place for place, name in enumerate(topology.needed_pods)}
    found = [one for one in _failures(status, needed, observed, policy, now) if one[0].pod in needed]
    if not found:
        return None
    first = min(_rank(failure) for _, failure in found)
    return _first_of_one_pass([one for one in found if _rank(one[1]) == first], observed, needed)


def find_spare_failures(
    status: GRPOJobStatus, topology: Topology, observed: Observed, policy: FailurePolicy, now: datetime
) -> list[Failure]:
    """Return the failures of pods that the job does not need."""
    needed = set(topology.needed_pods)
    return [one for member, one in _failures(status, needed, observed, policy, now) if member.pod not in needed]


def _failures(
    status: GRPOJobStatus, needed: Container[str], observed: Observed, policy: FailurePolicy, now: datetime
) -> Iterator[tuple[MemberStatus, Failure]]:
    something_ended = any(one.outcome for one in status.members if one.pod in needed and not one.replacing)
    for member in status.members:
        if member.replacing:
            continue
        verdict = _verdict(member, observed, policy, now, something_ended=something_ended)
        if verdict is None or (is_done(verdict) and member.role == Role.TRAINER):
            continue
        taken = member.disruption if member.disruption and verdict.reason == member.disruption.reason else None
        failure = Failure(
            role=member.role,
            pod=member.pod,
            node=member.node,
            exit_code=verdict.exit_code if verdict.exit_code >= 0 else None,
            reason=verdict.reason,
            message=_whole_message(member, verdict, observed),
            time=verdict.finished_at or now,
            attempt=status.attempt or 0,
            counted=verdict.reason != Reason.EVICTED or (taken is not None and taken.own_fault),
        )
        yield member, failure


_TAKEN = (Reason.EVICTED, Reason.PREEMPTED, Reason.NODE_LOST)


def _rank(failure: Failure) -> tuple[bool, bool, datetime]:
    return failure.reason not in _TAKEN, failure.exit_code in EFFECTS, failure.time


def _first_of_one_pass(
    found: Sequence[tuple[MemberStatus, Failure]], observed: Observed, order: Mapping[str, int]
) -> Failure:
    """Return the first of failures that were seen in one pass.

    Only the times of pods on one node are compared. Of several nodes' first failures an engine's comes before that of
    ranks, which may have lost it.
    """

    def on_its_node(one: tuple[MemberStatus, Failure]) -> tuple[datetime, bool, int]:
        member, failure = one
        pod = _pod(member, observed)
        ended = pod.outcome.finished_at if pod and pod.outcome else None
        return ended or NEVER, failure.role == Role.TRAINER, order[member.pod]

    firsts: dict[str | None, tuple[MemberStatus, Failure]] = {}
    for one in sorted(found, key=on_its_node):
        firsts.setdefault(one[1].node, one)
    return min((failure for _, failure in firsts.values()), key=lambda f: (f.role == Role.TRAINER, order[f.pod or ""]))


def _whole_message(member: MemberStatus, verdict: MemberOutcome, observed: Observed) -> str:
    """Return the message of a verdict as the pod still says it; the status holds its beginning."""
    pod = _pod(member, observed)
    said = {
        one.message for one in (pod and pod.outcome, pod and pod.disruption) if one and one.reason == verdict.reason
    }
    return max(said | {verdict.message}, key=len)


def _pod(member: MemberStatus, observed: Observed) -> ObservedPod | None:
    """Return the member as it is, or was last."""
    pod = observed.pods.get(member.pod)
    return observed.gone.get(member.uid) if pod is None or pod.uid != member.uid else pod


def has_unexplained_pods(status: GRPOJobStatus, observed: Observed) -> bool:
    """Whether a pod of the attempt is gone and nothing shows how it ended."""
    known = {pod.uid for pod in observed.pods.values()} | observed.gone.keys()
    return any(m.uid not in known and not (m.outcome or m.disruption or m.replacing) for m in status.members)


def _verdict(
    member: MemberStatus, observed: Observed, policy: FailurePolicy, now: datetime, *, something_ended: bool
) -> MemberOutcome | None:
    pod = observed.pods.get(member.pod)
    if is_done(member.outcome):
        return member.outcome
    same = pod is not None and pod.uid == member.uid
    if same and pod is not None and (since := node_lost_since(pod, observed, policy, now)):
        limit = f"longer than failurePolicy.nodeLostSeconds ({policy.node_lost_seconds})"
        message = f"node {pod.node} has not been ready since {rfc3339(since)}, {limit}: its pods are given up"
        return _ended(Reason.NODE_LOST, message)
    # As long as nothing has ended, the pod that is being taken away may still save a checkpoint with the others.
    if member.disruption is not None and (something_ended or not same):
        return _ended(member.disruption.reason, member.disruption.message)
    return member.outcome or _unrecorded(member, pod)


def _ended(reason: str, message: str) -> MemberOutcome:
    return MemberOutcome(exit_code=-1, reason=reason, message=message)


def _unrecorded(member: MemberStatus, pod: ObservedPod | None) -> MemberOutcome | None:
    """Return the outcome of a pod that left no result and no longer can, or None."""
    if pod is None or pod.uid != member.uid:
        message = f"the pod was deleted while its {'ranks' if member.role == Role.TRAINER else 'engines'} were running"
        return _ended(Reason.POD_REPLACED, message)
    if pod.restarts > 0:
        return _ended(Reason.OUTCOME_LOST, "the container was restarted and left no result")
    return None


def node_lost_since(pod: ObservedPod, observed: Observed, policy: FailurePolicy, now: datetime) -> datetime | None:
    """Return since when the pod's node is lost, if that is longer than failurePolicy.nodeLostSeconds, else None."""
    since = observed.lost_nodes.get(pod.node or "")
    return since if since is not None and seconds_between(since, now) >= policy.node_lost_seconds else None


def is_done(outcome: MemberOutcome | None) -> bool:
    """Whether the pod finished its work."""
    return outcome is not None and outcome.exit_code == ExitCode.DONE


def may_be_an_effect(failure: Failure, status: GRPOJobStatus, now: datetime) -> bool:
    """Whether this failure is secondary and so recent that the root cause may still be reported."""
    if failure.exit_code not in EFFECTS:
        return False
    silent = any(
        member.outcome is None and not member.replacing for member in status.members if member.role == Role.TRAINER
    )
    return seconds_between(failure.time, now) < (SILENT_CULPRIT_SECONDS if silent else CULPRIT_SECONDS)


def of_silent_pod(failure: Failure, status: GRPOJobStatus, partners: Container[str]) -> Failure:
    """Return the failure of the one pod of an engine that has not ended, if another one has only lost it."""
    silent = [m for m in status.members if m.pod in partners and m.outcome is None and not m.replacing]
    if failure.exit_code != ExitCode.PEER_LOST or len(silent) != 1:
        return failure
    return edit(failure, pod=silent[0].pod, node=silent[0].node, exit_code=None)


def seems_hung(report: Progress | None, policy: FailurePolicy) -> bool:
    """Whether a launcher reports that no step has finished and no rank of its pod has made progress for too long.

    A launcher that does not answer is not a hang.
    """
    if report is None or report.waiting_for:
        return False
    return idle_seconds(report) > hang_seconds(report, policy)


def idle_seconds(report: Progress) -> float:
    """Return for how long no step has finished and no rank of a launcher's pod has made progress."""
    return report.age_seconds if report.idle_seconds is None else min(report.age_seconds, report.idle_seconds)


def hang_seconds(report: Progress, policy: FailurePolicy) -> float:
    """Return how long that must last to be a hang."""
    return max(policy.hang_seconds, HANG_FACTOR * (report.step_seconds or 0.0))


def find_hang(
    status: GRPOJobStatus,
    topology: Topology,
    observed: Observed,
    reports: Reports,
    policy: FailurePolicy,
    now: datetime,
) -> Failure | None:
    """Return a failure if all needed pods are ready and no rank makes progress; its message says each rank's phase.

    Ranks that wait for an engine to return do not hang.
    """
    member = topology.members[0]
    master = reports.get(member.pod)
    if not all(name in observed.pods and observed.pods[name].ready for name in topology.needed_pods):
        return None
    if status.running_time is None or master is None or not all(seems_hung(one, policy) for one in reports.values()):
        return None
    phases = {int(rank): phase for report in reports.values() for rank, phase in report.rank_phases.items()}
    where = "; ".join(f"rank {rank}: {phases[rank]}" for rank in sorted(phases)) or f"phase {master.phase}"
    since = f"{master.age_seconds:.0f} s (failurePolicy.hangSeconds), since step {master.step}"
    message = f"no step has finished for {since}; {where}"
    node = next((one.node for one in status.members if one.pod == member.pod), None)
    return Failure(
        role=Role.TRAINER,
        pod=member.pod,
        node=node,
        reason=Reason.HUNG,
        message=clip(message, 4096),
        time=now,
        attempt=status.attempt or 0,
    )
