"""The GRPOJob's status: observed state, written whole by the operator and by nobody else."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.podtemplate import list_map
from grpo_workload.contract import Progress
from grpo_workload.section import Section


class StatusSection(Section):
    """A part of the status: written by the operator alone, so unbounded lists are bounded by the spec's."""


class ConditionStatus(StatusSection):
    """metav1.Condition."""

    type: str = Field(max_length=64, description="Accepted, Scheduled, Running, Restarting, Suspended, Hung, Complete or Failed.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(max_length=128, description="Word for programs.")
    message: str = Field(max_length=32768, description="Sentence for people.")
    last_transition_time: str = Field(max_length=40, description="When the status last changed.")
    observed_generation: int = Field(description="Generation of the spec it speaks of.")


class GroupStatus(StatusSection):
    """Pods of a group."""

    name: str = Field(max_length=63, description="Name of the group.")
    role: str = Field(max_length=16, description="trainer or generation.")
    desired: int = Field(description="Pods wanted.")
    ready: int = Field(description="Pods whose ranks run.")
    incarnation: int = Field(0, description="Pods of the group that were made anew while the trainer went on (RestartGeneration).")


class MemberOutcome(StatusSection):
    """How a pod's launcher ended, recorded at first sight."""

    exit_code: int = Field(description="Exit code of the container.")
    reason: str = Field(max_length=128, description="Word for programs.")
    message: str = Field(max_length=4096, description="What the launcher, or the kubelet, said.")
    finished_at: str = Field(max_length=40, description="When it ended.")


class Disruption(StatusSection):
    """Why the cluster took a pod away."""

    reason: str = Field(max_length=128, description="Evicted, Preempted, NodeLost or PodReplaced.")
    message: str = Field(max_length=4096, description="What the cluster said.")


class MemberStatus(StatusSection):
    """One pod of the epoch."""

    pod: str = Field(max_length=253, description="Name of the pod.")
    role: str = Field(max_length=16, description="trainer or generation.")
    uid: str = Field(max_length=64, description="UID it was first seen with; another UID is another pod.")
    node: str | None = Field(None, max_length=253, description="Node it runs on.")
    outcome: MemberOutcome | None = Field(None, description="How it ended.")
    disruption: Disruption | None = Field(None, description="Why the cluster took the pod away, if it did.")
    replacing: bool = Field(False, description="Whether the pod is to be deleted and made anew while the trainer goes on.")


class Failure(StatusSection):
    """What ended an attempt."""

    pod: str | None = Field(None, max_length=253, description="Pod that failed first.")
    role: str | None = Field(None, max_length=16, description="trainer or generation.")
    node: str | None = Field(None, max_length=253, description="Node it ran on.")
    exit_code: int | None = Field(None, description="Exit code of its container.")
    reason: str = Field(max_length=128, description="Word for programs.")
    message: str = Field(max_length=4096, description="What went wrong, with the last log lines where there are any.")
    time: str = Field(max_length=40, description="When.")
    epoch: int = Field(0, description="Attempt it ended.")
    counted: bool = Field(True, description="Whether the restart after it counts towards failurePolicy.maxRestarts.")


class Restarts(StatusSection):
    """Restarts, of the whole job or of an engine."""

    total: int = Field(0, description="All of them.")
    counted: int = Field(0, description="Those that count towards failurePolicy.maxRestarts.")


class AvoidedNode(StatusSection):
    """A node that pods are kept from, where there is another."""

    name: str = Field(max_length=253, description="Name of the node.")
    until: str = Field(max_length=40, description="Attempts that begin later may use it again.")


class ProgressStatus(StatusSection):
    """The last progress that rank 0 reported."""

    step: int = Field(0, description="Optimizer steps done.")
    total_steps: int = Field(0, description="Optimizer steps to do.")
    reward: float | None = Field(None, description="Mean reward of the last step.")
    metrics: dict[Annotated[str, Field(max_length=128)], float] = Field(
        default_factory=dict, max_length=128, description="Metrics of the last step under TRL's names."
    )
    tokens_per_second: float | None = Field(None, description="Completion tokens generated and trained a second, over the last step.")
    weight_version: int | None = Field(None, description="Version of the weights that generation uses.")
    checkpoint_step: int | None = Field(None, description="Step of the newest checkpoint.")
    time: str = Field(max_length=40, description="When the operator read it.")

    @classmethod
    def read(cls, progress: Progress, now: str) -> ProgressStatus:
        """What of a launcher's report goes into the status; numbers rounded for the reader."""
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
    """Strings for the columns of `kubectl get`."""

    step: str = Field("", max_length=32, description="Steps done of all, as 12/40.")
    reward: str = Field("", max_length=32, description="Mean reward of the last step.")
    trainer: str = Field("", max_length=32, description="Ready trainer pods of all, as 3/3.")
    generation: str = Field("", max_length=32, description="Ready generation pods of all, or the topology that has none.")
    reason: str = Field("", max_length=128, description="Reason of the phase.")
    message: str = Field("", max_length=32768, description="The phase in a sentence.")


class GRPOJobStatus(StatusSection):
    """Observed state of a GRPOJob."""

    phase: str = Field(
        "Pending",
        max_length=32,
        description="A word for people: Pending, Invalid, Starting, Running, Restarting, Suspended, Succeeded, Failed.",
    )
    observed_generation: int = Field(0, description="Generation of the spec that was last acted on.")
    conditions: Annotated[tuple[ConditionStatus, ...], Field(max_length=32)] = Field(
        (), description="What holds.", json_schema_extra=list_map("type")
    )
    epoch: int | None = Field(None, description="Number of the current attempt; set before the first pod is made.")
    epoch_start_time: str | None = Field(None, max_length=40, description="When the current attempt began.")
    running_time: str | None = Field(None, max_length=40, description="When all pods of the current attempt were first ready.")
    restarts: Restarts = Field(default_factory=Restarts, description="Restarts so far.")
    next_restart_time: str | None = Field(None, max_length=40, description="When the next attempt may begin, while Restarting.")
    avoid_nodes: Annotated[tuple[AvoidedNode, ...], Field(max_length=64)] = Field(
        (), description="Nodes that were lost, which the current attempt keeps away from if it can.", json_schema_extra=list_map("name")
    )
    start_time: str | None = Field(None, max_length=40, description="When the job was accepted.")
    active_since: str | None = Field(None, max_length=40, description="Since when the job has been active without suspension.")
    active_seconds: int = Field(0, description="Seconds it was active before that.")
    completion_time: str | None = Field(None, max_length=40, description="When it became Complete or Failed.")
    groups: Annotated[tuple[GroupStatus, ...], Field(max_length=64)] = Field((), description="Pods, group by group.")
    members: Annotated[tuple[MemberStatus, ...], Field(max_length=8192)] = Field((), description="Pods of the epoch.")
    last_failure: Failure | None = Field(None, description="What ended the last attempt that failed.")
    progress: ProgressStatus | None = Field(None, description="The last progress that rank 0 reported.")
    checkpoint: str | None = Field(None, max_length=1024, description="Newest checkpoint, as a path below the claim and its subPath.")
    summary: Summary = Field(default_factory=Summary, description="Strings for the columns of kubectl get.")
