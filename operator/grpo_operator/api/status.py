"""The status of a GRPOJob: observed state, which only the operator writes, always as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from grpo_operator.api.names import Condition
from grpo_operator.api.placement_status import Admission, AvoidedNode, FailedNode, PlacementStatus, PlacementTimeouts
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.pod_template import list_map
from grpo_operator.api.progress_status import DownloadStatus, EvaluationStatus, ExportStatus, ProgressStatus
from grpo_operator.api.status_section import StatusSection
from grpo_operator.api.times import Time
from grpo_operator.api.usage_status import Usage
from grpo_spec import lenient


class ConditionStatus(StatusSection):
    """A condition, as metav1.Condition."""

    type: str = Field(max_length=64, description=f"One of {', '.join(Condition)}.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: str = Field(max_length=128, description="Why, as one word for programs.")
    message: str = Field(max_length=32768, description="Why, as a sentence for people.")
    last_transition_time: Time = Field(description="Time when `status` last changed.")
    observed_generation: int = Field(description="metadata.generation that the condition was set for.")


class GroupStatus(StatusSection):
    """State of a group's pods."""

    name: str = Field(max_length=63, description="Name of the group.")
    role: str = Field(max_length=16, description="Role of its pods: trainer, generation or environment.")
    desired: int = Field(description="Number of pods that the spec asks for.")
    ready: int = Field(
        description="Number of pods that are ready: their ranks, their engine or their environments run."
    )
    incarnation: int = Field(
        0,
        description="Number of times that a pod of the group was replaced while the trainer waited "
        "(RestartGeneration).",
    )


class MemberOutcome(StatusSection):
    """End of a pod, recorded as soon as it was seen."""

    exit_code: int = Field(description="Exit code of the container; -1 if there is none.")
    reason: str = Field(max_length=128, description="Cause of the end, a word for programs.")
    message: str = Field(max_length=4096, description="Cause of the end in words of launcher or kubelet.")
    finished_at: Time | None = Field(
        None, description="Time when the operator first saw that it had ended: the clocks of nodes differ."
    )


class Disruption(StatusSection):
    """Reason for which the cluster takes a pod away."""

    reason: str = Field(max_length=128, description="Evicted, Preempted, NodeLost or PodReplaced.")
    message: str = Field(max_length=4096, description="What the reason means, with the words of the cluster.")
    own_fault: bool = Field(
        False,
        exclude_if=lambda own: not own,
        description="Whether the pod exceeded a limit of its own: the cluster gives no DisruptionTarget for it.",
    )


class MemberStatus(StatusSection):
    """One pod of the current attempt."""

    pod: str = Field(max_length=253, description="Name of the pod.")
    role: str = Field(max_length=16, description="Role of the pod: trainer, generation, environment or download.")
    uid: str = Field(max_length=64, description="UID of the pod; a pod with another UID is not this member.")
    node: str | None = Field(None, max_length=253, description="Node that the pod runs on.")
    outcome: MemberOutcome | None = Field(None, description="End of the pod; absent while it runs.")
    disruption: Disruption | None = Field(None, description="Why the cluster takes the pod away, if it does.")
    replacing: bool = Field(
        False,
        exclude_if=lambda replacing: not replacing,
        description="Whether the operator replaces the pod alone: an engine, with RestartGeneration.",
    )
    replace_time: Time | None = Field(
        None, description="Earliest time when the pod is replaced, or was the last time; absent if it never was."
    )
    failures: int = Field(
        0,
        exclude_if=lambda failures: not failures,
        description="Number of times in a row that a pod of this name was replaced; the wait doubles with each.",
    )


class Failure(StatusSection):
    """The failure that ended an attempt, or that replaced an engine."""

    pod: str | None = Field(
        None, max_length=253, description="Pod that failed first; absent if a deadline ended the attempt or the job."
    )
    role: str | None = Field(
        None, max_length=16, description="Role of the pod: trainer, generation, environment or download."
    )
    node: str | None = Field(None, max_length=253, description="Node that the pod ran on.")
    exit_code: int | None = Field(None, description="Exit code of the pod's container, if it has one.")
    reason: str = Field(max_length=128, description="Failure, as one word for programs.")
    message: str = Field(max_length=4096, description="Failure, for people, with the log's last lines if any.")
    time: Time = Field(description="Time when the operator first saw the failure.")
    attempt: int = Field(0, ge=0, description="Number of the attempt that failed.")
    step: int | None = Field(None, description="Number of steps done then, as far as this attempt had reported it.")
    counted: bool = Field(
        True, description="Whether the restart after this failure counts towards failurePolicy.maxRestarts."
    )


class Restarts(StatusSection):
    """Number of restarts of the whole job, and of single engines that it needs."""

    total: int = Field(0, description="Number of all restarts.")
    counted: int = Field(
        0,
        description="Number of restarts that count towards failurePolicy.maxRestarts; 0 again after "
        "failurePolicy.recoverySteps new steps.",
    )


class RecentRestarts(StatusSection):
    """Restarts since the job last made progress (failurePolicy.recoverySteps)."""

    total: int = Field(
        description="Number of these restarts, counted or not; the wait before the next one doubles with each."
    )
    step: int = Field(0, description="Highest step that was reached before them; new steps are those beyond it.")


class Summary(StatusSection):
    """Texts for the columns of `kubectl get`."""

    step: str = Field("", max_length=32, description="Steps done / all steps, such as 12/40.")
    reward: str = Field("", max_length=32, description="Mean reward of the last step.")
    best: str = Field("", max_length=64, description="Best value of evaluations and its step, such as 0.71@150.")
    trainer: str = Field("", max_length=32, description="Ready trainer pods / all trainer pods, such as 3/3.")
    generation: str = Field(
        "", max_length=32, description="Ready / all generation pods, or the topology if it has no generation pods."
    )
    environments: str = Field("", max_length=32, description="Ready / all environment pods, if it has any.")
    reason: str = Field("", max_length=128, description="Cause of the phase, as one word.")
    message: str = Field("", max_length=32768, description="Cause of the phase, as a sentence.")


class ElasticStatus(StatusSection):
    """The engine pods whose number may change, for `kubectl scale` and autoscalers."""

    replicas: int = Field(description="Number of pods that exist.")
    selector: str = Field(max_length=256, description="Labels of these pods.")


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
        None, ge=0, description="Number of the current attempt, from 0; set before its first pod is created."
    )
    pods_attempt: int | None = Field(
        None,
        ge=0,
        description="Number of the attempt that the pods were created for; absent where that is `attempt`. Later "
        "attempts begin in the same pods with failurePolicy.restartStrategy InPlace.",
    )
    attempt_start_time: Time | None = Field(None, description="Time when the current attempt began.")
    running_time: Time | None = Field(None, description="Time when all pods of the current attempt were first ready.")
    admission: Admission | None = Field(
        None, description="Kueue's admission of the current attempt; absent without a queue, and while the job waits."
    )
    placement: PlacementStatus | None = Field(
        None, description="Set while the current attempt has not run, and some of its pods have a node and others none."
    )
    placement_timeouts: PlacementTimeouts | None = Field(
        None,
        description="Attempts in a row that ended because only some of their pods found a node; absent once an attempt "
        "runs.",
    )
    restarts: Restarts = Field(
        default_factory=Restarts,
        description="Number of restarts of the whole job, and of single engines that it needs.",
    )
    recent_restarts: RecentRestarts | None = Field(
        None, description="Restarts since the job last made progress; absent if there were none."
    )
    defaults: dict[str, JsonValue] | None = Field(
        None,
        description="The value of each field that the spec does not set, in its shape: the default when an attempt "
        "first used it. Later attempts keep it, whatever the defaults of a newer release.",
    )
    site: dict[str, JsonValue] | None = Field(
        None,
        description="What GRPOClusterDefaults and GRPODefaults set when the job was accepted, by kind; its attempts "
        "keep it.",
    )
    pod_requests: PodRequests | None = Field(
        None,
        description="What pods request of cpu and memory where podTemplate does not say: the operator's settings when "
        "it was accepted, which its attempts keep. Absent if it began without.",
    )
    micro_batch_halvings: int = Field(
        0,
        ge=0,
        le=64,
        description="Number of times that micro-batches were halved because training ran out of memory; later attempts "
        "keep the smaller ones.",
    )
    next_restart_time: Time | None = Field(
        None, description="Earliest time when the next attempt begins; set while Restarting."
    )
    download: DownloadStatus | None = Field(
        None, description="The download before the first attempt; absent once that begins, and without cache.prefetch."
    )
    avoid_nodes: Annotated[tuple[AvoidedNode, ...], Field(max_length=64)] = Field(
        (),
        description="Nodes that new pods avoid if another one is free: lost ones, and those on which pods failed "
        "again.",
        json_schema_extra=list_map("name"),
    )
    failed_nodes: Annotated[tuple[FailedNode, ...], Field(max_length=64)] = Field(
        (),
        description="Nodes on which attempts or engines failed since the job last made progress.",
        json_schema_extra=list_map("name"),
    )
    start_time: Time | None = Field(None, description="Time when the job was accepted.")
    active_since: Time | None = Field(None, description="Time since when the job has been active without a suspension.")
    active_seconds: int = Field(0, description="Seconds that the job was active before `activeSince`.")
    completion_time: Time | None = Field(None, description="Time when it became Complete or Failed.")
    groups: Annotated[tuple[GroupStatus, ...], Field(max_length=64)] = Field(
        (), description="State of the pods of each group."
    )
    members: Annotated[tuple[MemberStatus, ...], Field(max_length=8192)] = Field(
        (), description="Pods of the current attempt."
    )
    elastic: ElasticStatus | None = Field(
        None, description="The pods of generation.server.elastic; absent if the spec does not have it."
    )
    last_failure: Failure | None = Field(None, description="The most recent failure.")
    progress: ProgressStatus | None = Field(None, description="The last progress that rank 0 reported.")
    evaluation: EvaluationStatus | None = Field(
        None, description="The last evaluation, and the best one; absent without spec.evaluation."
    )
    checkpoint: str | None = Field(
        None, max_length=1024, description="Newest checkpoint, as a path below the claim's storage.subPath."
    )
    export: ExportStatus | None = Field(
        None, description="Newest model of storage.export, which `grpo export` fetches; absent while there is none."
    )
    usage: Usage | None = Field(None, description="GPU seconds that pods held; absent without GPUs.")
    summary: Summary = Field(default_factory=Summary, description="Texts for the columns of kubectl get.")

    @property
    def created_for(self) -> int | None:
        """Number of the attempt that the pods were created for: their label and the names of their objects have it."""
        return self.attempt if self.pods_attempt is None else self.pods_attempt

    @property
    def over(self) -> range:
        """The earlier attempts in the same pods."""
        return range(0) if self.pods_attempt is None else range(self.pods_attempt, self.attempt or 0)


def read_status(raw: Any) -> GRPOJobStatus:
    """Read a stored status, which an operator of another release may have written. Never raises."""
    return lenient.read(GRPOJobStatus, raw if isinstance(raw, Mapping) else {})
