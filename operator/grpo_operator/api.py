"""The GRPOJob, version v1alpha1: the source of the CRD, of admission and of what `kubectl explain` says.

The sections that the trainer reads are the workload's own models (`grpo_workload.config`); what is added here concerns Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel

from grpo_operator import names
from grpo_workload.config import Name, Rule, Section, TrainerConfig
from grpo_workload.contract import RESERVED_ENV, Device, Progress

Object = dict[Annotated[str, Field(max_length=253)], JsonValue]
LabelMap = dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]]
TextMap = dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=4096)]]
Objects = Annotated[tuple[Object, ...], Field(max_length=64)]


def list_map(key: str) -> dict[str, JsonValue]:
    """Schema extension: the list is a map by `key`, which server-side apply merges by and the API server keeps unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class EnvVar(Section):
    """A variable of the container, as in a pod."""

    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the variable.")
    value: Annotated[str, Field(max_length=32768)] | None = Field(None, description="Its value.")
    value_from: Object | None = Field(None, description="Source of its value, as in a pod: secretKeyRef, configMapKeyRef, fieldRef.")


class PodTemplate(Section):
    """What of a pod users set; container name, command, GPU limit and reserved variables belong to the operator."""

    RULES = (
        Rule(
            f"!has(self.env) || self.env.all(e, !(e.name in [{', '.join(repr(name) for name in sorted(RESERVED_ENV))}]))",
            f"env must not set the operator's own variables: {', '.join(sorted(RESERVED_ENV))}",
            lambda t: not any(e.name in RESERVED_ENV for e in t.env),
        ),
    )

    labels: LabelMap = Field(default_factory=dict, max_length=64, description="Further labels of the pod.")
    annotations: TextMap = Field(default_factory=dict, max_length=64, description="Further annotations of the pod.")
    node_selector: LabelMap = Field(default_factory=dict, max_length=64, description="Labels a node must have.")
    tolerations: Objects = Field((), description="Taints the pod tolerates.")
    affinity: Object = Field(default_factory=dict, description="Affinity, as in a pod.")
    priority_class_name: Name | None = Field(None, description="PriorityClass of the pod.")
    service_account_name: Name | None = Field(None, description="Service account; its token is not mounted.")
    image_pull_secrets: Objects = Field((), description="Secrets for pulling the image.")
    security_context: Object = Field(
        default_factory=dict, description="The pod's security context, laid over the default: non-root 65532, seccomp RuntimeDefault."
    )
    env: Annotated[tuple[EnvVar, ...], Field(max_length=256)] = Field(
        (), description="Variables of the container.", json_schema_extra=list_map("name")
    )
    env_from: Objects = Field((), description="ConfigMaps and Secrets whose keys become variables.")
    resources: Object = Field(default_factory=dict, description="Requests and limits, as in a pod; the GPU limit is the group's `gpus`.")
    volumes: Objects = Field((), description="Further volumes.")
    volume_mounts: Objects = Field((), description="Further mounts of the container.")
    termination_grace_period_seconds: int | None = Field(
        None, ge=1, le=86400, description="Time to save a checkpoint after SIGTERM; 300 by default."
    )


class DeviceConfig(Section):
    """What the ranks compute on."""

    type: Device = Field(Device.CUDA, description="cuda, or cpu for trials without GPUs.")
    resource_name: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None, description="Extended resource a pod asks `gpus` of; nvidia.com/gpu for cuda when not set, none for cpu when not set."
    )

    @property
    def resource(self) -> str | None:
        """The extended resource that pods ask for, if any."""
        return self.resource_name or ("nvidia.com/gpu" if self.type is Device.CUDA else None)


class TrainerGroup(Section):
    """Trainer pods of one kind. Groups may differ in GPUs; all groups form one world."""

    name: Annotated[str, Field(min_length=1, max_length=20, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the group, unique in the job."
    )
    replicas: int = Field(1, ge=1, le=4096, description="Pods of the group.")
    gpus: int = Field(ge=1, le=64, description="GPUs of each pod: its limit, and its number of ranks.")
    pod_template: PodTemplate = Field(default_factory=PodTemplate, description="Laid over spec.podTemplate for this group.")


class TrainerSpec(Section):
    """The trainer's pods."""

    groups: Annotated[tuple[TrainerGroup, ...], Field(min_length=1, max_length=32)] = Field(
        description="Groups in rank order.", json_schema_extra=list_map("name")
    )

    @property
    def ranks(self) -> int:
        """Ranks over all groups."""
        return sum(group.replicas * group.gpus for group in self.groups)

    @property
    def pods(self) -> int:
        """Pods over all groups."""
        return sum(group.replicas for group in self.groups)


class RendezvousSpec(Section):
    """How ranks find each other."""

    RULES = (Rule("self.port != self.statusPort", "port and statusPort must differ", lambda r: r.port != r.status_port),)

    port: int = Field(29500, ge=1024, le=65535, description="Port of torch's store on rank 0's pod.")
    status_port: int = Field(29501, ge=1024, le=65535, description="Port of every launcher's HTTP server.")
    timeout_seconds: int = Field(600, ge=10, le=86400, description="Deadline for all pods to find each other.")


class CacheSpec(Section):
    """Where model and dataset downloads go."""

    claim_name: Name | None = Field(None, description="PersistentVolumeClaim shared by the pods; an emptyDir when not set.")


class GRPOJobSpec(TrainerConfig):
    """Desired state of a GRPOJob."""

    RULES = (
        Rule(
            "self.trainer.groups.map(g, g.replicas * g.gpus).sum() <= self.training.promptsPerStep",
            "training.promptsPerStep must be at least the number of ranks (the sum of replicas x gpus over trainer.groups), "
            "or ranks would be left without a prompt; raise promptsPerStep or use fewer GPUs",
            lambda s: s.trainer.ranks <= s.training.prompts_per_step,
        ),
    )

    image: Annotated[str, Field(min_length=1, max_length=512)] = Field(names.DEFAULT_IMAGE, description="Image of the trainer's container.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="When the image is pulled.")
    device: DeviceConfig = Field(default_factory=DeviceConfig, description="What the ranks compute on.")
    trainer: TrainerSpec = Field(description="The trainer's pods.")
    rendezvous: RendezvousSpec = Field(default_factory=RendezvousSpec, description="How ranks find each other.")
    cache: CacheSpec = Field(default_factory=CacheSpec, description="Where model and dataset downloads go.")
    pod_template: PodTemplate = Field(default_factory=PodTemplate, description="Pod settings for all groups.")

    def trainer_config(self) -> TrainerConfig:
        """The part of the spec that ranks read."""
        return TrainerConfig(**{name: getattr(self, name) for name in TrainerConfig.model_fields})


class StatusSection(Section):
    """A part of the status: written by the operator alone, so unbounded lists are bounded by the spec's."""


class ConditionStatus(StatusSection):
    """metav1.Condition."""

    type: str = Field(max_length=64, description="Accepted, Scheduled, Running, Complete or Failed.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(max_length=128, description="Word for programs.")
    message: str = Field(max_length=32768, description="Sentence for people.")
    last_transition_time: str = Field(max_length=40, description="When the status last changed.")
    observed_generation: int = Field(description="Generation of the spec it speaks of.")


class GroupStatus(StatusSection):
    """Pods of a group."""

    name: str = Field(max_length=63, description="Name of the group.")
    role: str = Field(max_length=16, description="trainer.")
    desired: int = Field(description="Pods wanted.")
    ready: int = Field(description="Pods whose ranks run.")


class MemberOutcome(StatusSection):
    """How a pod's launcher ended, recorded at first sight."""

    exit_code: int = Field(description="Exit code of the container.")
    reason: str = Field(max_length=128, description="Word for programs.")
    message: str = Field(max_length=4096, description="What the launcher, or the kubelet, said.")
    finished_at: str = Field(max_length=40, description="When it ended.")


class MemberStatus(StatusSection):
    """One trainer pod of the epoch."""

    pod: str = Field(max_length=253, description="Name of the pod.")
    uid: str = Field(max_length=64, description="UID it was first seen with; another UID is another pod.")
    node: str | None = Field(None, max_length=253, description="Node it runs on.")
    outcome: MemberOutcome | None = Field(None, description="How it ended.")


class Failure(StatusSection):
    """What ended the job."""

    pod: str | None = Field(None, max_length=253, description="Pod that failed first.")
    node: str | None = Field(None, max_length=253, description="Node it ran on.")
    exit_code: int | None = Field(None, description="Exit code of its container.")
    reason: str = Field(max_length=128, description="Word for programs.")
    message: str = Field(max_length=4096, description="What went wrong, with the last log lines where there are any.")
    time: str = Field(max_length=40, description="When.")


class Restarts(StatusSection):
    """Restarts of the whole job."""

    total: int = Field(0, description="All of them.")


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
    generation: str = Field("", max_length=32, description="Topology of generation.")
    reason: str = Field("", max_length=128, description="Reason of the phase.")
    message: str = Field("", max_length=32768, description="The phase in a sentence.")


class GRPOJobStatus(StatusSection):
    """Observed state of a GRPOJob."""

    phase: str = Field("Pending", max_length=32, description="A word for people: Pending, Invalid, Starting, Running, Succeeded, Failed.")
    observed_generation: int = Field(0, description="Generation of the spec that was last acted on.")
    conditions: Annotated[tuple[ConditionStatus, ...], Field(max_length=32)] = Field(
        (), description="What holds.", json_schema_extra=list_map("type")
    )
    epoch: int | None = Field(None, description="Number of the current attempt; set before the first pod is made.")
    restarts: Restarts = Field(default_factory=Restarts, description="Restarts of the whole job.")
    start_time: str | None = Field(None, max_length=40, description="When the job was accepted.")
    completion_time: str | None = Field(None, max_length=40, description="When it became Complete or Failed.")
    groups: Annotated[tuple[GroupStatus, ...], Field(max_length=64)] = Field((), description="Pods, group by group.")
    members: Annotated[tuple[MemberStatus, ...], Field(max_length=8192)] = Field((), description="Trainer pods of the epoch.")
    last_failure: Failure | None = Field(None, description="What ended the job.")
    progress: ProgressStatus | None = Field(None, description="The last progress that rank 0 reported.")
    checkpoint: str | None = Field(None, max_length=1024, description="Newest checkpoint, as a path below the claim and its subPath.")
    summary: Summary = Field(default_factory=Summary, description="Strings for the columns of kubectl get.")


def parse_spec(raw: Any) -> GRPOJobSpec:
    """Read a spec. Raises ValueError whose text names each field, what is wrong and what would do."""
    try:
        return GRPOJobSpec.model_validate(raw)
    except ValidationError as error:
        raise ValueError(explain(error)) from error


def explain(error: ValidationError) -> str:
    """One sentence for each fault: `spec.trainer.groups[0].gpus: Input should be greater than or equal to 1 (found 0)`."""
    return "; ".join(_fault(fault["loc"], fault["msg"], fault["input"]) for fault in error.errors(include_url=False))


def _fault(location: tuple[int | str, ...], message: str, found: Any) -> str:
    path = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{to_camel(part)}" for part in location)
    shown = f" (found {found!r})" if isinstance(found, str | int | float | bool) else ""
    return f"{path}: {message.removeprefix('Value error, ')}{shown}"
