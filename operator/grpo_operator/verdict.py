"""Who is to blame: from what became of each pod to the one failure that ended the job. Pure."""

from __future__ import annotations

from datetime import datetime

from grpo_operator.jobstatus import Failure, GRPOJobStatus, MemberOutcome, MemberStatus
from grpo_operator.names import Reason, Role
from grpo_operator.observe import Observed, ObservedPod
from grpo_workload.contract import ExitCode

CULPRIT_SECONDS = 5
"""How long a lost peer is not yet the verdict: the pod that failed first names the cause, and its outcome may come a little later."""


def find_failure(status: GRPOJobStatus, observed: Observed, now: str) -> Failure | None:
    """The pod that failed first. A pod that only lost its peers comes last, and an engine before the ranks that missed it within the
    same second: they name an effect and not the cause.
    """
    failures = []
    for member in status.members:
        pod = observed.pods.get(member.pod)
        verdict = member.outcome or _lost(member, pod, now)
        if verdict is not None and not (is_done(verdict) and member.role == Role.TRAINER):
            failures.append(
                Failure(
                    role=member.role,
                    pod=member.pod,
                    node=member.node,
                    exit_code=verdict.exit_code,
                    reason=verdict.reason,
                    message=verdict.message,
                    time=verdict.finished_at or now,
                )
            )
    return min(failures, key=lambda f: (f.exit_code == ExitCode.PEER_LOST, f.time, f.role == Role.TRAINER), default=None)


def _lost(member: MemberStatus, pod: ObservedPod | None, now: str) -> MemberOutcome | None:
    """A pod whose outcome can no longer be learned."""
    if pod is not None and pod.uid != member.uid:
        message = f"pod {member.pod} on node {member.node} was deleted or evicted and came back as another pod; its ranks are gone"
        return MemberOutcome(exit_code=-1, reason=Reason.POD_REPLACED, message=message, finished_at=now)
    if pod is not None and pod.restarts > 0:
        message = f"the container of pod {member.pod} was restarted and left no result"
        return MemberOutcome(exit_code=-1, reason=Reason.OUTCOME_LOST, message=message, finished_at=now)
    return None


def is_done(outcome: MemberOutcome | None) -> bool:
    """Whether a pod ended as it should."""
    return outcome is not None and outcome.exit_code == ExitCode.DONE


def may_be_an_effect(failure: Failure, now: str) -> bool:
    """Whether the pod that failed first may still be about to tell: this one only lost it, a moment ago."""
    fresh = seconds_between(failure.time, now) < CULPRIT_SECONDS
    return failure.exit_code == ExitCode.PEER_LOST and fresh


def seconds_between(earlier: str, later: str) -> float:
    """Seconds from one timestamp to another."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
