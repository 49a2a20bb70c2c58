"""Apply `failurePolicy` to one failure: end the job or restart, and how long to wait before the next attempt. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from grpo_operator.api.failure_policy import FailurePolicy, FailureRule
from grpo_operator.api.names import Role
from grpo_operator.api.status import Failure, MemberOutcome, Restarts
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode
from grpo_spec.words import every

FREE = frozenset({Reason.PREEMPTED, Reason.NODE_LOST, Reason.STOPPED, Reason.PLACEMENT_TIMEOUT})
"""Reasons that no user or program is to blame for: restarts after them do not count unless a rule says so. Nor do those
after an eviction, unless the pod exceeded a limit of its own, and after a refusal by a kubelet."""

MAX_HALVINGS = 3
"""Number of restarts after OutOfMemory that halve the micro-batches and do not count. Later ones count."""

JITTER = 0.2
"""Largest share by which a wait is shortened or extended: jobs that failed together restart at different times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer to a failure."""

    action: Literal["Fail", "RestartAll", "RestartGeneration"]
    counted: bool  # whether the restart counts towards failurePolicy.maxRestarts
    why: str  # the part of the policy that decided, for people


def halves_micro_batches(failure: Failure, halvings: int) -> bool:
    """Whether a restart after `failure` halves the micro-batches once more, after `halvings` times."""
    return failure.reason == Reason.OUT_OF_MEMORY and halvings < MAX_HALVINGS


def decide(policy: FailurePolicy, failure: Failure, restarts: Restarts, halvings: int = 0) -> Decision:
    """Apply the first rule that matches, else the defaults. A counted restart beyond maxRestarts becomes Fail.

    `halvings`: how often restarts have halved the micro-batches.
    """
    decision = _decide(policy, failure, halvings)
    if decision.action != "Fail" and decision.counted and restarts.counted >= policy.max_restarts:
        most = "failurePolicy.maxRestarts"
        spent = f"{every(policy.max_restarts, f'restart of {most} is', f'restarts of {most} are')} used up"
        return Decision(action="Fail", counted=True, why=spent if policy.max_restarts else f"{most} is 0")
    return decision


def _decide(policy: FailurePolicy, failure: Failure, halvings: int) -> Decision:
    field = "onGenerationFailure" if failure.role == Role.GENERATION else "onTrainerFailure"
    action = policy.on_generation_failure if failure.role == Role.GENERATION else policy.on_trainer_failure
    why = f"failurePolicy.{field} is {action}"
    if failure.reason == Reason.PLACEMENT_TIMEOUT:
        action, why = "RestartAll", "no pod has failed"
    is_free = failure.reason in FREE or (failure.exit_code is None and _is_refusal(failure.reason))
    counted = failure.counted and not is_free and not halves_micro_batches(failure, halvings)
    rule = next((rule for rule in policy.rules if _matches(rule, failure)), None)
    if rule is not None:
        why = f"failurePolicy rule {rule.name} says {rule.action}"
        if rule.action == "Fail":
            return Decision(action="Fail", counted=True, why=why)
        restart = "RestartAll" if action == "Fail" else action
        return Decision(action=restart, counted=rule.action == "Restart", why=why)
    if failure.reason == Reason.REPEATED_FAILURE:
        said = "the attempt before ended with the same exception at the same step: a restart would meet it again"
        return Decision(action="Fail", counted=True, why=f"repeated: {said}")
    if failure.reason == Reason.NOT_FINITE:
        return Decision(action="Fail", counted=True, why="a restart would meet the same numbers")
    if failure.reason == Reason.WEIGHTS_DIFFER:
        return Decision(action="Fail", counted=True, why="a restart would push the same weights in the same way")
    if failure.exit_code == ExitCode.CONFIG_ERROR or failure.reason == Reason.CONFIG_ERROR:
        return Decision(action="Fail", counted=True, why="a restart would fail on the same settings")
    return Decision(action=action, counted=counted, why=why)


def _matches(rule: FailureRule, failure: Failure) -> bool:
    return (
        (rule.role is None or rule.role == failure.role)
        and (rule.exit_codes is None or failure.exit_code in rule.exit_codes)
        and (rule.reasons is None or not {failure.reason, _as_first_seen(failure)}.isdisjoint(rule.reasons))
    )


def _as_first_seen(failure: Failure) -> str:
    """Return the reason before it was known that the failure is repeated: a rule about that holds too."""
    return Reason.RANK_FAILED if failure.reason == Reason.REPEATED_FAILURE else failure.reason


_REFUSALS = frozenset(
    {"UnexpectedAdmissionError", "TopologyAffinityError", "SMTAlignmentError", "NodeAffinity", "NodeShutdown"}
)


def was_refused(outcome: MemberOutcome | None) -> bool:
    """Whether a kubelet could not admit the pod, and may be able to soon: none of its containers has run.

    A device plugin restarts, or the scheduler knew less than the kubelet.
    """
    return outcome is not None and outcome.exit_code < 0 and _is_refusal(outcome.reason)


def _is_refusal(reason: str) -> bool:
    """Whether a kubelet gives this reason for a pod that it refuses. `OutOf` is followed by a resource."""
    return reason in _REFUSALS or reason.startswith("OutOf")


def backoff_seconds(policy: FailurePolicy, earlier: int, uid: str, total: int) -> int:
    """Return the seconds to wait before a restart, after `earlier` ones since the last progress.

    `uid` and `total` seed the jitter.
    """
    wait = min(float(policy.max_backoff_seconds), policy.backoff_seconds * 2.0 ** min(earlier, 30))
    return round(wait * (1 - JITTER + 2 * JITTER * _share(uid, total)))


def placement_seconds(limit: int, uid: str, attempt: int) -> int:
    """Return how long an attempt may be placed in part: at most `limit` seconds, less its jitter."""
    return max(1, round(limit * (1 - JITTER * _share(uid, attempt))))


def _share(uid: str, number: int) -> float:
    """Return a number from 0 to 1 that differs from job to job and from time to time, but not from pass to pass."""
    return hashlib.sha256(f"{uid}/{number}".encode()).digest()[0] / 255
