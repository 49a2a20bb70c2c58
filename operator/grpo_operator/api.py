"""The GRPOJob, version v1alpha1: the source of the CRD, of admission and of what `kubectl explain` says.

The sections that the trainer reads are the workload's own models (`grpo_workload.config`); what is added here concerns Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.alias_generators import to_camel

from grpo_operator import names
from grpo_operator.generationspec import GenerationSpec
from grpo_operator.podtemplate import PodGroup, PodTemplate, list_map
from grpo_operator.survivalspec import FailurePolicy
from grpo_workload.config import GenerationConfig, Topology, TrainerConfig
from grpo_workload.contract import Device
from grpo_workload.section import Name, Rule, Section


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


class TrainerGroup(PodGroup):
    """Trainer pods of one kind, a rank on each GPU. Groups may differ in GPUs; all groups form one world."""


class TrainerSpec(Section):
    """The trainer's pods."""

    groups: Annotated[tuple[TrainerGroup, ...], Field(min_length=1, max_length=32)] = Field(
        description="Groups in rank order.", json_schema_extra=list_map("name")
    )


class NetworkSpec(Section):
    """The fabric between nodes."""

    fabric: Literal["Ethernet", "InfiniBand", "RoCE", "EFA"] | None = Field(
        None, description="Sets NCCL's variables for it; NCCL finds out by itself when not set."
    )
    interface: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="Interface (or NCCL's list of prefixes) for sockets of NCCL and gloo, for example eth0."
    )
    rdma_resource: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None, description="Extended resource of the RDMA device plugin, for example rdma/hca or vpc.amazonaws.com/efa."
    )
    rdma_count: int = Field(1, ge=1, le=64, description="Number of `rdmaResource` for each pod.")


class RendezvousSpec(Section):
    """How ranks find each other."""

    RULES = (Rule("self.port != self.statusPort", "port and statusPort must differ", lambda r: r.port != r.status_port),)

    port: int = Field(29500, ge=1024, le=65535, description="Port of torch's store on rank 0's pod.")
    status_port: int = Field(29501, ge=1024, le=65535, description="Port of every launcher's HTTP server.")
    timeout_seconds: int = Field(600, ge=10, le=86400, description="Deadline for all pods to find each other, and of collectives.")


class CacheSpec(Section):
    """Where model and dataset downloads go."""

    claim_name: Name | None = Field(None, description="PersistentVolumeClaim shared by the pods; an emptyDir when not set.")


_KEPT = "(has(self.generation.nodeLocal) ? self.generation.nodeLocal.gpusPerNode : 0)"
_RANKS = f"self.trainer.groups.map(g, g.replicas * (g.gpus - {_KEPT})).sum()"
_PORTS = (
    "[self.rendezvous.port, self.rendezvous.statusPort]"
    " + (has(self.generation.server) ? [self.generation.server.port, self.generation.server.transferPort] : [])"
    " + (has(self.generation.nodeLocal) ? [self.generation.nodeLocal.port, self.generation.nodeLocal.transferPort] : [])"
)


class GRPOJobSpec(TrainerConfig):
    """Desired state of a GRPOJob."""

    RULES = (
        *TrainerConfig.RULES,
        Rule(
            "self.device.type != 'cpu' || self.model.dtype != 'float16'",
            "model.dtype float16 needs device.type cuda: next to no CPU computes in it; bfloat16 would work",
            lambda s: s.device.type != "cpu" or s.model.dtype != "float16",
        ),
        Rule(
            f"{_RANKS} <= self.training.promptsPerStep",
            "training.promptsPerStep must be at least the number of ranks (GPUs of all trainer pods, without those that generate), "
            "or ranks would be left without a prompt",
            lambda s: s.ranks <= s.training.prompts_per_step,
            lambda s: s.ranks,
            _RANKS,
        ),
        Rule(
            "!has(self.generation.nodeLocal) || self.trainer.groups.all(g, g.gpus > self.generation.nodeLocal.gpusPerNode)",
            "generation.nodeLocal.gpusPerNode must leave every trainer pod at least one GPU to train on",
            lambda s: s.generation.node_local is None or all(g.gpus > s.generation.node_local.gpus_per_node for g in s.trainer.groups),
            lambda s: max(1, min(g.gpus for g in s.trainer.groups) - 1),
            "[1, self.trainer.groups.map(g, g.gpus).min() - 1].max()",
        ),
        Rule(
            "!has(self.generation.nodeLocal) || !has(self.generation.nodeLocal.devices) || "
            "self.generation.nodeLocal.devices.all(d, self.trainer.groups.all(g, d < g.gpus))",
            "generation.nodeLocal.devices must be devices that every trainer pod has, 0 to gpus - 1; the highest that all have",
            lambda s: all(
                d < g.gpus for d in ((s.generation.node_local and s.generation.node_local.devices) or ()) for g in s.trainer.groups
            ),
            lambda s: min(g.gpus for g in s.trainer.groups) - 1,
            "self.trainer.groups.map(g, g.gpus).min() - 1",
        ),
        Rule(
            "self.generation.topology != 'Colocate' || self.trainer.groups.all(g, g.gpus % self.generation.tensorParallel == 0)",
            "generation.tensorParallel must divide gpus of every trainer group, for no tensor-parallel group may cross pods: "
            "1 always does, or choose other GPU counts",
            lambda s: (
                s.generation.topology is not Topology.COLOCATE or all(g.gpus % s.generation.tensor_parallel == 0 for g in s.trainer.groups)
            ),
        ),
        Rule(
            "!has(self.generation.server) || self.generation.server.groups.all(g, self.trainer.groups.all(t, t.name != g.name))",
            "groups of trainer.groups and generation.server.groups must have different names: each becomes a StatefulSet",
            lambda s: s.generation.server is None or not {g.name for g in s.generation.server.groups} & {g.name for g in s.trainer.groups},
        ),
        Rule(
            f"({_PORTS}).all(p, ({_PORTS}).exists_one(q, q == p))",
            "rendezvous.port, rendezvous.statusPort and the ports of generation must all differ",
            lambda s: len(set(s.ports)) == len(s.ports),
        ),
        Rule(
            "self.rewards.all(r, r.timeoutSeconds <= self.rendezvous.timeoutSeconds)",
            "rewards[].timeoutSeconds must be at most rendezvous.timeoutSeconds, after which the other ranks give up",
            lambda s: all(r.timeout_seconds <= s.rendezvous.timeout_seconds for r in s.rewards),
            lambda s: s.rendezvous.timeout_seconds,
            "self.rendezvous.timeoutSeconds",
        ),
        Rule(
            "self.failurePolicy.onGenerationFailure != 'RestartGeneration' || self.generation.topology == 'Server'",
            "failurePolicy.onGenerationFailure RestartGeneration needs topology Server, where engines have their own pods: use RestartAll",
            lambda s: s.failure_policy.on_generation_failure != "RestartGeneration" or s.generation.topology is Topology.SERVER,
        ),
    )

    image: Annotated[str, Field(min_length=1, max_length=512)] = Field(names.DEFAULT_IMAGE, description="Image of the trainer's container.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="When the image is pulled.")
    device: DeviceConfig = Field(default_factory=DeviceConfig, description="What the ranks compute on.")
    trainer: TrainerSpec = Field(description="The trainer's pods.")
    generation: GenerationSpec = Field(default_factory=GenerationSpec, description="Who samples completions, and where.")
    network: NetworkSpec = Field(default_factory=NetworkSpec, description="The fabric between nodes.")
    rendezvous: RendezvousSpec = Field(default_factory=RendezvousSpec, description="How ranks find each other.")
    cache: CacheSpec = Field(default_factory=CacheSpec, description="Where model and dataset downloads go.")
    pod_template: PodTemplate = Field(default_factory=PodTemplate, description="Pod settings for all groups.")
    suspend: bool = Field(False, description="Save a checkpoint and give all GPUs back; false again goes on from it.")
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        None, description=f"Controller that runs the job; this operator leaves a job alone unless it is {names.CONTROLLER} or not set."
    )
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy, description="What is restarted after a failure, and how often.")
    active_deadline_seconds: int | None = Field(
        None, ge=1, le=315_360_000, description="The job fails after so long; restarts do not begin it anew, suspension stops the clock."
    )
    startup_deadline_seconds: int = Field(
        86_400, ge=1, le=31_536_000, description="The job fails when an attempt's pods are not all ready after so long."
    )
    ttl_seconds_after_finished: int | None = Field(
        None, ge=0, le=315_360_000, description="The job is deleted so long after it has ended; never when not set."
    )

    @property
    def ranks(self) -> int:
        """Ranks over all trainer pods."""
        kept = self.generation.node_local.gpus_per_node if self.generation.node_local else 0
        return sum(group.replicas * (group.gpus - kept) for group in self.trainer.groups)

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports that pods listen on, as far as they are fields."""
        generation = self.generation.server or self.generation.node_local
        return (self.rendezvous.port, self.rendezvous.status_port, *((generation.port, generation.transfer_port) if generation else ()))

    def trainer_config(self) -> TrainerConfig:
        """The part of the spec that ranks read."""
        fields = {name: getattr(self, name) for name in TrainerConfig.model_fields}
        fields["generation"] = GenerationConfig(**{name: getattr(self.generation, name) for name in GenerationConfig.model_fields})
        return TrainerConfig(**fields)


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
