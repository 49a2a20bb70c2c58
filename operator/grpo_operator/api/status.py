"""The status of a GRPOJob: observed state, which only the operator writes, always as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from grpo_operator.api.names import Condition
from grpo_operator.api.pod_template import LabelMap, Objects, TextMap, list_map
from grpo_workload.spec import lenient
from grpo_workload.spec.reports import EvaluationProgress, Progress
from grpo_workload.spec.schema import Section

MAX_METRICS = 128
"""Most metrics that the status shows."""


def _moment(text: str) -> str:
    """Check a timestamp: code that reads a status counts on it. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or not 1970 <= moment.year < 9000:
        raise ValueError("a time with a time zone, such as 2026-01-31T12:00:00Z, would work")
    return text


Time = Annotated[str, Field(max_length=40), AfterValidator(_moment)]
TimeIfKnown = Annotated[str, Field(max_length=40), AfterValidator(lambda text: text and _moment(text))]
"""A time, or an empty text."""


def known_time(text: object) -> str:
    """Return a timestamp that another program wrote, or an empty text if it is none."""
    try:
        return _moment(text[:40]) if isinstance(text, str) else ""
    except ValueError:
        return ""


class StatusSection(Section):
    """A part of the status. Only the operator writes it: the spec bounds the length of lists without a limit."""


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
    finished_at: TimeIfKnown = Field(description="Time when it ended.")


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
        False,
        exclude_if=lambda replacing: not replacing,
        description="Whether the operator replaces the pod while the trainer waits (RestartGeneration).",
    )


class Failure(StatusSection):
    """The failure that ended an attempt, or that replaced an engine."""

    pod: str | None = Field(
        None, max_length=253, description="Pod that failed first; absent if a deadline ended the attempt or the job."
    )
    role: str | None = Field(None, max_length=16, description="Role of the pod: trainer or generation.")
    node: str | None = Field(None, max_length=253, description="Node that the pod ran on.")
    exit_code: int | None = Field(None, description="Exit code of the pod's container, if it has one.")
    reason: str = Field(max_length=128, description="What failed, as one word for programs.")
    message: str = Field(max_length=4096, description="What failed, for people, with the last lines of the log if any.")
    time: Time = Field(description="Time of the failure.")
    attempt: int = Field(0, ge=0, description="Number of the attempt that failed.")
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
    until: Time = Field(description="Attempts that begin after this time no longer avoid the node.")


class ProgressStatus(StatusSection):
    """The last progress that rank 0 reported."""

    step: int = Field(0, description="Number of optimizer steps done.")
    total_steps: int = Field(0, description="Number of optimizer steps of the whole run.")
    reward: float | None = Field(None, description="Mean reward of the last step.")
    metrics: dict[Annotated[str, Field(max_length=128)], float] = Field(
        default_factory=dict,
        max_length=MAX_METRICS,
        description="Metrics of the last step, under TRL's names; if there are too many, those of single rewards are "
        "left out first.",
    )
    tokens_per_second: float | None = Field(
        None, description="Completion tokens generated and trained per second, in the last step."
    )
    advice: str | None = Field(
        None,
        max_length=512,
        description="Whether ranks wait for engines or engines for ranks, and what would balance them; absent while it "
        "is unknown, and if neither waits long.",
    )
    weight_version: int | None = Field(None, description="Version of the weights that generation uses.")
    checkpoint_step: int | None = Field(None, description="Step of the newest checkpoint.")
    time: Time = Field(description="Time when the operator read this progress.")

    @classmethod
    def read(cls, progress: Progress, now: str) -> ProgressStatus:
        """Return the part of a launcher's report that the status shows, with rounded numbers."""
        of_the_job_first = sorted(progress.metrics.items(), key=lambda metric: metric[0].startswith("rewards/"))
        rounded = {name: float(f"{value:.6g}") for name, value in islice(of_the_job_first, MAX_METRICS)}
        return cls(
            step=progress.step,
            total_steps=progress.total_steps,
            reward=None if progress.reward is None else round(progress.reward, 4),
            metrics=rounded,
            tokens_per_second=None if progress.tokens_per_second is None else round(progress.tokens_per_second, 1),
            advice=progress.advice,
            weight_version=progress.weight_version,
            checkpoint_step=progress.checkpoint_step,
            time=now,
        )


class EvaluationStatus(StatusSection):
    """The last evaluation that rank 0 reported, and the best one."""

    step: int = Field(description="Number of steps taken before the last evaluation.")
    metric: str = Field(max_length=128, description="Name of the metric: evaluation.metricForBestModel.")
    value: float | None = Field(None, description="Its value in the last evaluation.")
    best_step: int | None = Field(None, description="Number of steps taken before the best evaluation.")
    best_metric: float | None = Field(None, description="Value of the metric in the best evaluation.")
    stops: bool = Field(
        False,
        exclude_if=lambda stops: not stops,
        description="Whether evaluation.earlyStoppingPatience ended the training.",
    )

    @property
    def why_stopped(self) -> str:
        """Why the training ended before its last step, for the end of a sentence; empty if it did not."""
        return f", because {self.metric} was best after step {self.best_step}" if self.stops else ""

    @classmethod
    def read(cls, said: EvaluationProgress | None) -> EvaluationStatus | None:
        """Return what the status shows of a launcher's report, with rounded numbers."""
        if said is None:
            return None
        value, best = (None if one is None else float(f"{one:.6g}") for one in (said.value, said.best))
        return cls(
            step=said.step,
            metric=said.metric,
            value=value,
            best_step=said.best_step,
            best_metric=best,
            stops=said.stops,
        )


class PlacementStatus(StatusSection):
    """How many pods of the current attempt have a node, while others have none."""

    placed: int = Field(description="Number of pods that have a node; the largest so far in this attempt.")
    since: Time = Field(description="Time when this number was reached; scheduling.timeoutSeconds counts from it.")


class PlacementTimeouts(StatusSection):
    """Attempts in a row that ended because only some of their pods found a node."""

    total: int = Field(description="Number of these attempts; the wait before the next attempt doubles with each.")
    since: Time = Field(description="Time when the first of them began; startupDeadlineSeconds counts from it.")


class GroupAdmission(StatusSection):
    """What Kueue's admission adds to the pods of a group."""

    name: str = Field(max_length=63, description="Name of the group.")
    node_selector: LabelMap = Field(default_factory=dict, description="Labels of the nodes of the resource flavors.")
    tolerations: Objects = Field((), description="Tolerations of the resource flavors.")
    labels: LabelMap = Field(default_factory=dict, description="Labels by which Kueue finds the pods.")
    annotations: TextMap = Field(default_factory=dict, description="Annotations by which Kueue finds the pods.")
    gated: bool = Field(
        False, description="Whether the pods wait until Kueue has chosen a place for each (topology-aware scheduling)."
    )


class Admission(StatusSection):
    """Kueue's admission that the current attempt runs with."""

    workload: str = Field(max_length=253, description="Name of the Workload.")
    uid: str = Field(max_length=64, description="UID of the Workload.")
    cluster_queue: str = Field(max_length=253, description="ClusterQueue whose quota the attempt uses.")
    groups: Annotated[tuple[GroupAdmission, ...], Field(max_length=64)] = Field(
        (), description="What the admission adds to the pods of each group."
    )


class Summary(StatusSection):
    """Texts for the columns of `kubectl get`."""

    step: str = Field("", max_length=32, description="Steps done / all steps, such as 12/40.")
    reward: str = Field("", max_length=32, description="Mean reward of the last step.")
    best: str = Field("", max_length=64, description="Best value of evaluations and its step, such as 0.71@150.")
    trainer: str = Field("", max_length=32, description="Ready trainer pods / all trainer pods, such as 3/3.")
    generation: str = Field(
        "", max_length=32, description="Ready / all generation pods, or the topology if it has no generation pods."
    )
    reason: str = Field("", max_length=128, description="Why the job is in this phase, as one word.")
    message: str = Field("", max_length=32768, description="Why the job is in this phase, as a sentence.")


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
        default_factory=Restarts, description="Number of restarts of the whole job and of single engines."
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
    avoid_nodes: Annotated[tuple[AvoidedNode, ...], Field(max_length=64)] = Field(
        (),
        description="Lost nodes that new pods avoid if another node is free.",
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
    summary: Summary = Field(default_factory=Summary, description="Texts for the columns of kubectl get.")


def read_status(raw: Any) -> GRPOJobStatus:
    """Read a stored status, which an operator of another release may have written. Never raises."""
    return lenient.read(GRPOJobStatus, raw if isinstance(raw, Mapping) else {})
