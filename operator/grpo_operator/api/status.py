"""The status of a GRPOJob: observed state, which only the operator writes, always as a whole."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.api.names import Condition
from grpo_operator.api.pod_template import list_map
from grpo_workload.spec.contract import Progress
from grpo_workload.spec.schema import Section


class StatusSection(Section):
    """A part of the status. Only the operator writes it: the spec bounds the length of lists without a limit."""


class ConditionStatus(StatusSection):
    """A condition, as metav1.Condition."""

    type: str = Field(max_length=64, description=f"One of {', '.join(Condition)}.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: str = Field(max_length=128, description="Why, as one word for programs.")
    message: str = Field(max_length=32768, description="Why, as a sentence for people.")
    last_transition_time: str = Field(max_length=40, description="Time when `status` last changed.")
    observed_generation: int = Field(description="metadata.generation that the condition was set for.")


class GroupStatus(StatusSection):
    """State of a group's pods."""

    name: str = Field(max_length=63, description="Name of the group.")
    role: str = Field(max_length=16, description="Role of its pods: trainer or generation.")
    desired: int = Field(description="Number of pods that the spec asks for.")
    ready: int = Field(description="Number of pods that are ready: their ranks or their engine run.")
    incarnation: int = Field(
        0,
        description="Number of times that a pod of the group was replaced while the trainer waited "
        "(RestartGeneration).",
    )


class MemberOutcome(StatusSection):
    """How a pod ended, recorded as soon as it was seen."""

    exit_code: int = Field(description="Exit code of the container; -1 if there is none.")
    reason: str = Field(max_length=128, description="Why it ended, as one word for programs.")
    message: str = Field(max_length=4096, description="Why it ended, in the words of the launcher or the kubelet.")
    finished_at: str = Field(max_length=40, description="Time when it ended.")


class Disruption(StatusSection):
    """Why the cluster takes a pod away."""

    reason: str = Field(max_length=128, description="Evicted, Preempted, NodeLost or PodReplaced.")
    message: str = Field(max_length=4096, description="What the reason means, with the words of the cluster.")


class MemberStatus(StatusSection):
    """One pod of the current attempt."""

    pod: str = Field(max_length=253, description="Name of the pod.")
    role: str = Field(max_length=16, description="Role of the pod: trainer or generation.")
    uid: str = Field(max_length=64, description="UID of the pod; a pod with another UID is not this member.")
    node: str | None = Field(None, max_length=253, description="Node that the pod runs on.")
    outcome: MemberOutcome | None = Field(None, description="How the pod ended; absent while it runs.")
    disruption: Disruption | None = Field(None, description="Why the cluster takes the pod away, if it does.")
    replacing: bool = Field(
        False, description="Whether the operator replaces the pod while the trainer waits (RestartGeneration)."
    )


class Failure(StatusSection):
    """The failure that ended an attempt, or that replaced an engine."""

    pod: str | None = Field(
        None, max_length=253, description="Pod that failed first; absent if a deadline ended the job."
    )
    role: str | None = Field(None, max_length=16, description="Role of the pod: trainer or generation.")
    node: str | None = Field(None, max_length=253, description="Node that the pod ran on.")
    exit_code: int | None = Field(None, description="Exit code of the pod's container, if it has one.")
    reason: str = Field(max_length=128, description="What failed, as one word for programs.")
    message: str = Field(max_length=4096, description="What failed, for people, with the last lines of the log if any.")
    time: str = Field(max_length=40, description="Time of the failure.")
    attempt: int = Field(0, description="Number of the attempt that failed.")
    counted: bool = Field(
        True, description="Whether the restart after this failure counts towards failurePolicy.maxRestarts."
    )


class Restarts(StatusSection):
    """Number of restarts of the whole job and of single engines."""

    total: int = Field(0, description="Number of all restarts.")
    counted: int = Field(0, description="Number of restarts that count towards failurePolicy.maxRestarts.")


class AvoidedNode(StatusSection):
    """A lost node that new pods avoid if another node is free."""

    name: str = Field(max_length=253, description="Name of the node.")
    until: str = Field(max_length=40, description="Attempts that begin after this time no longer avoid the node.")


class ProgressStatus(StatusSection):
    """The last progress that rank 0 reported."""

    step: int = Field(0, description="Number of optimizer steps done.")
    total_steps: int = Field(0, description="Number of optimizer steps of the whole run.")
    reward: float | None = Field(None, description="Mean reward of the last step.")
    metrics: dict[Annotated[str, Field(max_length=128)], float] = Field(
        default_factory=dict, max_length=128, description="Metrics of the last step, under TRL's names."
    )
    tokens_per_second: float | None = Field(
        None, description="Completion tokens generated and trained per second, in the last step."
    )
    weight_version: int | None = Field(None, description="Version of the weights that generation uses.")
    checkpoint_step: int | None = Field(None, description="Step of the newest checkpoint.")
    time: str = Field(max_length=40, description="Time when the operator read this progress.")

    @classmethod
    def read(cls, progress: Progress, now: str) -> ProgressStatus:
        """Return the part of a launcher's report that the status shows, with rounded numbers."""
        rounded = {name: float(f"{value:.6g}") for name, value in progress.metrics.items()}
        return cls(
            step=progress.step,
            total_steps=progress.total_steps,
            reward=None if progress.reward is None else round(progress.reward, 4),
            metrics=rounded,
            tokens_per_second=None if progress.tokens_per_second is None else round(progress.tokens_per_second, 1),
            weight_version=progress.weight_version,
            checkpoint_step=progress.checkpoint_step,
            time=now,
        )


class Summary(StatusSection):
    """Texts for the columns of `kubectl get`."""

    step: str = Field("", max_length=32, description="Steps done / all steps, such as 12/40.")
    reward: str = Field("", max_length=32, description="Mean reward of the last step.")
    trainer: str = Field("", max_length=32, description="Ready trainer pods / all trainer pods, such as 3/3.")
    generation: str = Field(
        "", max_length=32, description="Ready / all generation pods, or the topology if it has no generation pods."
    )
    reason: str = Field("", max_length=128, description="Why the job is in this phase, as one word.")
    message: str = Field("", max_length=32768, description="Why the job is in this phase, as a sentence.")


class GRPOJobStatus(StatusSection):
    """Observed state of a GRPOJob."""

    phase: str = Field(
        "Pending",
        max_length=32,
        description="State of the job for people; programs read conditions. Pending, Invalid, Starting, Running, "
        "Restarting, Suspended, Succeeded or Failed.",
    )
    observed_generation: int = Field(0, description="metadata.generation that the operator last acted on.")
    conditions: Annotated[tuple[ConditionStatus, ...], Field(max_length=32)] = Field(
        (), description="Conditions of the job, one of each type.", json_schema_extra=list_map("type")
    )
    attempt: int | None = Field(
        None, description="Number of the current attempt, from 0; set before its first pod is created."
    )
    attempt_start_time: str | None = Field(None, max_length=40, description="Time when the current attempt began.")
    running_time: str | None = Field(
        None, max_length=40, description="Time when all pods of the current attempt were first ready."
    )
    restarts: Restarts = Field(
        default_factory=Restarts, description="Number of restarts of the whole job and of single engines."
    )
    next_restart_time: str | None = Field(
        None, max_length=40, description="Earliest time when the next attempt begins; set while Restarting."
    )
    avoid_nodes: Annotated[tuple[AvoidedNode, ...], Field(max_length=64)] = Field(
        (),
        description="Lost nodes that new pods avoid if another node is free.",
        json_schema_extra=list_map("name"),
    )
    start_time: str | None = Field(None, max_length=40, description="Time when the job was accepted.")
    active_since: str | None = Field(
        None, max_length=40, description="Time since when the job has been active without a suspension."
    )
    active_seconds: int = Field(0, description="Seconds that the job was active before `activeSince`.")
    completion_time: str | None = Field(None, max_length=40, description="Time when it became Complete or Failed.")
    groups: Annotated[tuple[GroupStatus, ...], Field(max_length=64)] = Field(
        (), description="State of the pods of each group."
    )
    members: Annotated[tuple[MemberStatus, ...], Field(max_length=8192)] = Field(
        (), description="Pods of the current attempt."
    )
    last_failure: Failure | None = Field(None, description="The most recent failure.")
    progress: ProgressStatus | None = Field(None, description="The last progress that rank 0 reported.")
    checkpoint: str | None = Field(
        None, max_length=1024, description="Newest checkpoint, as a path below the claim's storage.subPath."
    )
    summary: Summary = Field(default_factory=Summary, description="Texts for the columns of kubectl get.")
