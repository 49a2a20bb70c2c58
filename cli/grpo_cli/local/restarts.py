"""Decides whether and when a local run's pods begin again, by the operator's own rules."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from grpo_operator.api.names import Role
from grpo_operator.api.status import Failure, Restarts
from grpo_operator.decide.failure_policy import Decision, backoff_seconds, decide, halves_micro_batches
from grpo_operator.decide.repeats import is_repeated
from grpo_operator.layout.job import Job
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason
from grpo_spec.reports import Outcome


class Answer(NamedTuple):
    """The decision after a pod has ended."""

    decision: Decision
    wait: int  # seconds, if anything begins again
    halves: bool  # whether an attempt that begins halves the micro-batches


class LocalRestarts:
    """Counts the restarts of a run, of all of its pods together."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._restarts = Restarts()
        self._recent, self._since = 0, 0  # restarts since the last progress, and the step of the first of them
        self._last: Failure | None = None  # of a trainer

    def forget_after_progress(self, step: int) -> None:
        """Forget earlier restarts once failurePolicy.recoverySteps new steps are done; the run has done `step`."""
        policy = self._job.spec.failure_policy
        if self._recent and policy.recovery_steps and step >= self._since + policy.recovery_steps:
            self._recent, self._restarts = 0, Restarts(total=self._restarts.total)

    def after(self, pod: str, role: Role, ended: Outcome, step: int, halvings: int = 0) -> Answer:
        """Decide after a pod has ended; a restart is counted.

        `halvings`: how often restarts have halved the micro-batches.
        """
        policy, earlier = self._job.spec.failure_policy, self._restarts
        failure = Failure(
            pod=pod,
            role=role,
            exit_code=ended.exit_code,
            reason=ended.reason,
            message=clip(ended.message, 4096),
            time=datetime.now(UTC),
            attempt=ended.attempt,
            step=step,
        )
        if role == Role.TRAINER:
            if self._last is not None and is_repeated(failure, self._last):
                failure = failure.model_copy(update={"reason": Reason.REPEATED_FAILURE})
            self._last = failure
        decision = decide(policy, failure, earlier, halvings)
        wait = backoff_seconds(policy, self._recent, self._job.uid, earlier.total)
        if decision.action != "Fail":
            self._since = self._since if self._recent else step
            self._recent += 1
            self._restarts = Restarts(total=earlier.total + 1, counted=earlier.counted + decision.counted)
        return Answer(decision, wait, halves_micro_batches(failure, halvings))
