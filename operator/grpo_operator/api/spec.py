"""The spec of a GRPOJob, version v1alpha1: source of the CRD, of validation and of `kubectl explain`.

The sections that the ranks read are the workload's models (`grpo_spec.trainer`); the sections here concern
Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from grpo_operator.api import names
from grpo_operator.api.environment_pods import ENVIRONMENT_POD_RULES, EnvironmentPodsSpec
from grpo_operator.api.failure_policy import FailurePolicy
from grpo_operator.api.faults import explain
from grpo_operator.api.generation import GenerationSpec
from grpo_operator.api.infrastructure import (
    CacheSpec,
    DeviceConfig,
    NetworkSpec,
    RendezvousSpec,
    SchedulingSpec,
    TrainerSpec,
)
from grpo_operator.api.pod_template import GroupSpec, LabelMap, PodTemplate, TextMap
from grpo_operator.api.spec_rules import SPEC_RULES
from grpo_operator.api.strict import read_strictly
from grpo_spec.generation import GenerationConfig
from grpo_spec.trainer import TrainerConfig


class GRPOJobSpec(TrainerConfig):
    """Desired state of a GRPOJob."""

    RULES = (*TrainerConfig.RULES, *SPEC_RULES, *ENVIRONMENT_POD_RULES)

    environment_pods: EnvironmentPodsSpec | None = Field(
        None,
        description="Pods in which tools and environments run, where they are not to run in processes beside each "
        "rank. Set it where they need more CPUs or memory than trainer pods have, or must be kept apart from the "
        "job's data.",
    )
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^\S+$")] = Field(
        names.DEFAULT_IMAGE,
        description="Image of all pods: the workload image of the operator's release, or one built on it.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent",
        description="When the kubelet pulls the image. Set Always where a tag is pushed again, Never where images "
        "come to nodes in another way.",
    )
    device: DeviceConfig = Field(default_factory=DeviceConfig, description="Device that the ranks compute on.")
    trainer: TrainerSpec = Field(description="Pods that train.")
    generation: GenerationSpec = Field(
        default_factory=GenerationSpec, description="Engine that generates completions, and its place."
    )
    scheduling: SchedulingSpec = Field(
        default_factory=SchedulingSpec, description="Common placement of an attempt's pods."
    )
    network: NetworkSpec = Field(default_factory=NetworkSpec, description="Network between nodes.")
    rendezvous: RendezvousSpec = Field(
        default_factory=RendezvousSpec, description="Ports and deadline for ranks to find each other."
    )
    cache: CacheSpec = Field(default_factory=CacheSpec, description="Cache for downloads of models and datasets.")
    common_labels: LabelMap = Field(
        default_factory=dict,
        max_length=64,
        description="Labels of all objects of the job: pods, StatefulSets, Service, ConfigMap, NetworkPolicy. Set it "
        "where other programs, such as accounting or schedulers, go by labels. Those that the operator sets win.",
    )
    common_annotations: TextMap = Field(
        default_factory=dict,
        max_length=64,
        description="Annotations of all objects of the job. Set it where other programs read them.",
    )
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate,
        description="Pod settings of all groups. `kubectl explain pod.spec.<field>`, or pod.spec.containers.<field>, "
        "shows what is inside a field that is as in a pod.",
    )
    suspend: bool = Field(
        False,
        description="Set true to save a checkpoint, end all pods and give their GPUs back; false again to continue "
        "from it.",
    )
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        None,
        description="Controller that runs the job. This operator runs a job only if this is not set or "
        f"{names.CONTROLLER}. Set it where another controller runs the job, for example Kueue's MultiKueue.",
    )
    failure_policy: FailurePolicy = Field(
        default_factory=FailurePolicy, description="Restarts after failures, and their limit."
    )
    active_deadline_seconds: int | None = Field(
        None,
        ge=1,
        le=315_360_000,
        description="The job fails after it has been active for this many seconds. Set it to limit what a job may "
        "cost. Restarts do not reset the count, suspension pauses it. Default: no deadline.",
    )
    startup_deadline_seconds: int = Field(
        86_400,
        ge=1,
        le=31_536_000,
        description="The job fails if not all pods of an attempt are ready this many seconds after it began. Raise it "
        "where jobs wait for GPUs for days, lower it to hear sooner of one that cannot start. Attempts that end with "
        "PlacementTimeout do not reset the count.",
    )
    ttl_seconds_after_finished: int | None = Field(
        None,
        ge=0,
        le=315_360_000,
        description="The job is deleted this many seconds after it has ended. Set it where nobody deletes jobs. "
        "Default: it is kept.",
    )

    @property
    def pod_groups(self) -> tuple[GroupSpec, ...]:
        """All groups of pods: trainer pods, then engine pods, then environment pods."""
        return (
            *self.trainer.groups,
            *(self.generation.server.groups if self.generation.server else ()),
            *(self.environment_pods.groups if self.environment_pods else ()),
        )

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports that pods listen on and that are fields of the spec."""
        generation = self.generation.server or self.generation.node_local
        return (
            self.rendezvous.port,
            self.rendezvous.status_port,
            *((generation.port, generation.transfer_port) if generation else ()),
        )

    @property
    def num_ranks(self) -> int:
        """Number of GPUs that train."""
        engines = self.generation.node_local.gpus_per_node if self.generation.node_local else 0
        return sum(group.replicas * (group.gpus - engines) for group in self.trainer.groups)

    def trainer_config(self) -> TrainerConfig:
        """Return the part of the spec that ranks read."""
        fields = {name: getattr(self, name) for name in TrainerConfig.model_fields}
        fields["generation"] = GenerationConfig.model_construct(
            **{name: getattr(self.generation, name) for name in GenerationConfig.model_fields}
        )
        return TrainerConfig.model_construct(**fields)  # as it was read: a job that has begun may break a newer rule


def parse_spec(raw: Any) -> GRPOJobSpec:
    """Read a spec that a person wrote. Raises ValueError, which says which fields are wrong and what would be right."""
    return read_written(raw)[0]


def read_written(raw: Any) -> tuple[GRPOJobSpec, Any]:
    """Read a spec as parse_spec does; return it, and what was written without fields that are null."""
    try:
        return read_strictly(GRPOJobSpec, raw)
    except ValidationError as error:
        raise ValueError(explain(error, GRPOJobSpec)) from error
