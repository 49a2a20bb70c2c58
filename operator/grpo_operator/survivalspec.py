"""`spec.failurePolicy` and the deadlines: what becomes of a job when something goes wrong, or takes too long."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.podtemplate import list_map
from grpo_workload.section import Name, Rule, Section

Reasons = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=128)], ...], Field(min_length=1, max_length=64)]
ExitCodes = Annotated[tuple[Annotated[int, Field(ge=1, le=255)], ...], Field(min_length=1, max_length=64)]


class FailureRule(Section):
    """What to do about failures of one kind; all that is set must match."""

    RULES = (
        Rule(
            "has(self.role) || has(self.exitCodes) || has(self.reasons)",
            "a rule must name a role, exitCodes or reasons; what all failures get is set by onTrainerFailure and onGenerationFailure",
            lambda r: r.role is not None or r.exit_codes is not None or r.reasons is not None,
        ),
    )

    name: Name = Field(description="Name of the rule, told with the failure it matched.")
    role: Literal["trainer", "generation"] | None = Field(None, description="Role of the pod that failed.")
    exit_codes: ExitCodes | None = Field(None, description="Exit code of its container: one of these.")
    reasons: Reasons | None = Field(
        None, description="Reason as in status.lastFailure: RankFailed, EngineDied, OOMKilled, Evicted, Preempted, NodeLost, Hung, ..."
    )
    action: Literal["Fail", "Restart", "RestartFree"] = Field(
        description="Fail ends the job; Restart restarts what the role's policy restarts; RestartFree does so without counting it."
    )


class FailurePolicy(Section):
    """What is restarted after a failure, how often and how soon."""

    RULES = (
        Rule(
            "self.backoffSeconds <= self.maxBackoffSeconds",
            "backoffSeconds must be at most maxBackoffSeconds",
            lambda p: p.backoff_seconds <= p.max_backoff_seconds,
            lambda p: p.max_backoff_seconds,
            "self.maxBackoffSeconds",
        ),
    )

    max_restarts: int = Field(3, ge=0, le=10_000, description="Restarts that are counted before the job fails; 0 never restarts.")
    backoff_seconds: int = Field(10, ge=0, le=86_400, description="Wait before the first counted restart; it doubles with each.")
    max_backoff_seconds: int = Field(600, ge=0, le=86_400, description="Longest wait before a restart.")
    on_trainer_failure: Literal["RestartAll", "Fail"] = Field(
        "RestartAll", description="RestartAll: all pods are made anew, and training goes on from the last checkpoint."
    )
    on_generation_failure: Literal["RestartAll", "RestartGeneration", "Fail"] = Field(
        "RestartAll",
        description="RestartGeneration: the engine alone is made anew and filled with weights; the trainer waits (topology Server).",
    )
    node_lost_seconds: int = Field(
        60, ge=0, le=86_400, description="A pod whose node has not been ready for so long is deleted by force and counts as NodeLost."
    )
    hang_seconds: int = Field(
        1800, ge=30, le=604_800, description="No step for so long (or ten times the median step, if longer) while ranks answer is a hang."
    )
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=32)] = Field(
        (),
        description="Exceptions; the first that matches counts. Without any, a wrong setting fails the job, and eviction, preemption, the "
        "loss of a node and a stop with a checkpoint are not counted.",
        json_schema_extra=list_map("name"),
    )
