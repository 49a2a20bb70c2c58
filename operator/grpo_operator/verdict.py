"""Who is to blame: from what became of each pod to the one failure that ended an attempt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from grpo_operator.jobstatus import Failure, GRPOJobStatus, MemberOutcome, MemberStatus
from grpo_operator.names import Reason, Role
from grpo_operator.observe import Observed, ObservedPod
from grpo_operator.survivalspec import FailurePolicy
from grpo_operator.topology import Topology
from grpo_workload.contract import ExitCode, Progress

CULPRIT_SECONDS = 5
"""How long an effect is not yet the verdict: the pod that failed first names the cause, and its outcome may come a little later."""

SILENT_CULPRIT_SECONDS = 45
"""The same while a pod has not said how it ended: its node may be lost, which the cluster tells after 40 s (node-monitor-grace-period)."""

HANG_FACTOR = 10
"""Median steps without a new one that are a hang, where that is longer than failurePolicy.hangSeconds."""

EFFECTS = frozenset({ExitCode.PEER_LOST, ExitCode.STOPPED})
"""Exit codes of pods that ended for another's sake."""

Reports = Mapping[str, Progress]  # by pod: what launchers said just now; who did not answer is not in it


def find_failure(status: GRPOJobStatus, observed: Observed, policy: FailurePolicy, now: str) -> Failure | None:
    """The pod that failed first. Pods that the cluster took away come before others, those that ended for another's sake last, and an
    engine before the ranks that missed it within the same second: they name an effect and not the cause.
    """
    something_ended = any(member.outcome for member in status.members)
    failures = []
    for member in status.members:
        if member.replacing:
            continue
        verdict = _verdict(member, observed, policy, now, something_ended=something_ended)
        if verdict is not None and not (is_done(verdict) and member.role == Role.TRAINER):
            failures.append(
                Failure(
                    role=member.role,
                    pod=member.pod,
                    node=member.node,
                    exit_code=verdict.exit_code if verdict.exit_code >= 0 else None,
                    reason=verdict.reason,
                    message=verdict.message,
                    time=verdict.finished_at or now,
                    epoch=status.epoch or 0,
                )
            )
    taken = (Reason.EVICTED, Reason.PREEMPTED, Reason.NODE_LOST)
    return min(failures, key=lambda f: (f.reason not in taken, f.exit_code in EFFECTS, f.time, f.role == Role.TRAINER), default=None)


def are_unheard_of(status: GRPOJobStatus, observed: Observed) -> bool:
    """Whether pods of the attempt are gone and nobody has said how they ended."""
    known = {pod.uid for pod in observed.pods.values()} | observed.gone.keys()
    return any(m.uid not in known and not (m.outcome or m.disruption or m.replacing) for m in status.members)


def _verdict(member: MemberStatus, observed: Observed, policy: FailurePolicy, now: str, *, something_ended: bool) -> MemberOutcome | None:
    pod = observed.pods.get(member.pod)
    if is_done(member.outcome):
        return member.outcome
    same = pod is not None and pod.uid == member.uid
    if same and pod is not None and (since := lost(pod, observed, policy, now)):
        given_up = f"its pods are given up after {policy.node_lost_seconds} s of that (failurePolicy.nodeLostSeconds)"
        message = f"node {pod.node} has not been ready since {since}; {given_up}"
        return MemberOutcome(exit_code=-1, reason=Reason.NODE_LOST, message=message, finished_at=now)
    # Until something has ended, the pod that is taken away may still save a checkpoint with the others.
    if member.disruption is not None and (something_ended or not same):
        return MemberOutcome(exit_code=-1, reason=member.disruption.reason, message=member.disruption.message, finished_at=now)
    return member.outcome or _unrecorded(member, pod, now)


def _unrecorded(member: MemberStatus, pod: ObservedPod | None, now: str) -> MemberOutcome | None:
    """A pod whose outcome can no longer be learned."""
    if pod is None or pod.uid != member.uid:
        message = f"the pod was deleted, and its {'ranks' if member.role == Role.TRAINER else 'engines'} with it"
        return MemberOutcome(exit_code=-1, reason=Reason.POD_REPLACED, message=message, finished_at=now)
    if pod.restarts > 0:
        message = "the container was restarted and left no result"
        return MemberOutcome(exit_code=-1, reason=Reason.OUTCOME_LOST, message=message, finished_at=now)
    return None


def lost(pod: ObservedPod, observed: Observed, policy: FailurePolicy, now: str) -> str | None:
    """Since when a pod's node is lost, if for longer than failurePolicy.nodeLostSeconds."""
    since = observed.lost_nodes.get(pod.node or "")
    return since if since is not None and seconds_between(since, now) >= policy.node_lost_seconds else None


def is_done(outcome: MemberOutcome | None) -> bool:
    """Whether a pod ended as it should."""
    return outcome is not None and outcome.exit_code == ExitCode.DONE


def may_be_an_effect(failure: Failure, status: GRPOJobStatus, now: str) -> bool:
    """Whether the pod that failed first may still be about to tell: this one only ended for its sake, a moment ago."""
    if failure.exit_code not in EFFECTS:
        return False
    silent = any(member.outcome is None and not member.replacing for member in status.members if member.role == Role.TRAINER)
    return seconds_between(failure.time, now) < (SILENT_CULPRIT_SECONDS if silent else CULPRIT_SECONDS)


def seems_hung(master: Progress | None, policy: FailurePolicy) -> bool:
    """Whether rank 0's launcher answers that there has been no step for too long. Silence is no hang: nothing is known then."""
    if master is None or master.waiting_for:
        return False
    return master.age_seconds > max(policy.hang_seconds, HANG_FACTOR * (master.step_seconds or 0.0))


def find_hang(
    status: GRPOJobStatus, topology: Topology, observed: Observed, reports: Reports, policy: FailurePolicy, now: str
) -> Failure | None:
    """A world that answers and does not move, with what every rank is at. Ranks that wait for an engine to come back do not hang."""
    member = topology.members[0]
    master = reports.get(member.pod)
    if not all(name in observed.pods and observed.pods[name].ready for name in topology.pods):
        return None
    if status.running_time is None or master is None or not seems_hung(master, policy):
        return None
    phases = {int(rank): phase for report in reports.values() for rank, phase in report.rank_phases.items()}
    told = "; ".join(f"rank {rank}: {phases[rank]}" for rank in sorted(phases)) or f"phase {master.phase}"
    message = f"no step has been finished for {master.age_seconds:.0f} s, after step {master.step}: {told}"
    node = next((one.node for one in status.members if one.pod == member.pod), None)
    return Failure(
        role=Role.TRAINER, pod=member.pod, node=node, reason=Reason.HUNG, message=message[:4096], time=now, epoch=status.epoch or 0
    )


def seconds_between(earlier: str, later: str) -> float:
    """Seconds from one timestamp to another."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
