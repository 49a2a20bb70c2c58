"""`spec.failurePolicy`: what a job does after a failure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.api.pod_template import list_map
from grpo_spec.reasons import OF_FAILURES
from grpo_spec.schema import Name, Rule, Section

Reasons = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=128)], ...], Field(min_length=1, max_length=64)]
_LOWER = [reason.lower() for reason in OF_FAILURES]
ExitCodes = Annotated[tuple[Annotated[int, Field(ge=1, le=255)], ...], Field(min_length=1, max_length=64)]


class FailureRule(Section):
    """An action for failures of one kind.

    A failure matches if it has the role, exit code and reason that the rule sets.
    """

    RULES = (
        Rule(
            "has(self.role) || has(self.exitCodes) || has(self.reasons)",
            "a rule must name a role, exitCodes or reasons; onTrainerFailure and onGenerationFailure set what happens "
            "after all other failures",
            lambda r: r.role is not None or r.exit_codes is not None or r.reasons is not None,
        ),
        Rule(
            f"!has(self.reasons) || self.reasons.all(r, r in {list(map(str, OF_FAILURES))} || "
            f"!(r.lowerAscii() in {_LOWER}))",
            "reasons must be written as in status.lastFailure.reason, for example OOMKilled: another spelling matches "
            "no failure",
            lambda r: all(one in OF_FAILURES or one.lower() not in _LOWER for one in r.reasons or ()),
        ),
    )

    name: Name = Field(description="Name of the rule; messages about a failure name the rule that decided.")
    role: Literal["trainer", "generation"] | None = Field(
        None,
        description="Role of the pod that failed. Set it where the rule is for trainer pods, or engine pods, alone.",
    )
    exit_codes: ExitCodes | None = Field(
        None,
        description="Exit codes of the container; one must match. Set it for codes with which code of your own ends.",
    )
    reasons: Reasons | None = Field(
        None,
        description="Reasons as in status.lastFailure.reason; one must match: RankFailed, EngineDied, OOMKilled, "
        "Evicted, Preempted, NodeLost, Hung, ... Set it for failures that the cluster causes, or that a restart does "
        "not cure.",
    )
    action: Literal["Fail", "Restart", "RestartFree"] = Field(
        description="Fail ends the job. Restart restarts as onTrainerFailure or onGenerationFailure says, or all pods "
        "if that says Fail. RestartFree does the same, but the restart does not count towards maxRestarts."
    )


class FailurePolicy(Section):
    """Restarts after failures: their scope, number and pace."""

    RULES = (
        Rule(
            "self.backoffSeconds <= self.maxBackoffSeconds",
            "backoffSeconds must be at most maxBackoffSeconds",
            lambda p: p.backoff_seconds <= p.max_backoff_seconds,
            lambda p: p.max_backoff_seconds,
            "self.maxBackoffSeconds",
        ),
    )

    max_restarts: int = Field(
        3,
        ge=0,
        le=10_000,
        description="Number of restarts that may count before the next failure that counts ends the job; with 0 the "
        "first one ends it. They are forgotten after recoverySteps new steps.",
    )
    recovery_steps: int = Field(
        10,
        ge=0,
        le=10_000_000,
        description="Number of new steps after which earlier restarts are forgotten: none counts any more, and the "
        "next wait is backoffSeconds again. Steps that are repeated after a restart are not new. Raise it where a run "
        "that fails so often is better ended; with 0 restarts are never forgotten.",
    )
    backoff_seconds: int = Field(
        10,
        ge=0,
        le=86_400,
        description="Seconds to wait before the first restart, of all pods or of an engine alone. The wait doubles "
        "with each restart, counted or not, until recoverySteps new steps are done; plus or minus 20 percent. Raise it "
        "where what fails takes longer to come back.",
    )
    max_backoff_seconds: int = Field(
        600,
        ge=0,
        le=86_400,
        description="Longest wait before a restart, in seconds. Raise it where what fails may be away for hours, "
        "lower it where waiting costs more than trying.",
    )
    on_trainer_failure: Literal["RestartAll", "Fail"] = Field(
        "RestartAll",
        description="What to do when a trainer pod fails. RestartAll recreates all pods and continues from the last "
        "checkpoint. Fail ends the job. Set Fail to look into a failure that comes back.",
    )
    on_generation_failure: Literal["RestartAll", "RestartGeneration", "Fail"] = Field(
        "RestartAll",
        description="What to do when an engine pod fails. RestartAll and Fail as for the trainer. RestartGeneration "
        "recreates only the engine and sends it the weights while the trainer waits; it needs the topology Server.",
    )
    restart_strategy: Literal["Recreate", "InPlace"] = Field(
        "Recreate",
        description="How all pods restart. Recreate deletes them, and the next attempt's look for nodes again. With "
        "InPlace the next attempt begins in the same pods, which keep their GPUs, if ranks or engines have "
        "failed while all pods and nodes are well; otherwise pods are recreated. Set InPlace where other jobs wait "
        "for the GPUs.",
    )
    node_lost_seconds: int = Field(
        60,
        ge=0,
        le=86_400,
        description="Seconds that a node may be not ready. After that its pods are deleted by force and the failure "
        "is NodeLost. Raise it where nodes are often not ready for a while, and come back.",
    )
    hang_seconds: int = Field(
        1800,
        ge=30,
        le=604_800,
        description="A job hangs if for this many seconds, or for ten median steps if that is longer, no step has "
        "finished, and no rank has sampled a token, scored an answer or entered a phase, although launchers answer. "
        "Raise it where one phase, such as training, takes that long.",
    )
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=32)] = Field(
        (),
        description="Exceptions for some failures; the first rule that matches decides. Where none matches, a wrong "
        "setting (exit code 64) and an exception that comes again at the same step end the job, and restarts after "
        "what the cluster takes away do not count: docs/failures.md has them all. Elastic engines, which the job does "
        "not need, are replaced whatever rules say.",
        json_schema_extra=list_map("name"),
    )
