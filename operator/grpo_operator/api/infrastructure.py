"""Sections of the spec about devices, trainer pods, their nodes, the network, the rendezvous and the cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.api.pod_template import GpuGroup, list_map
from grpo_spec.contract import Device
from grpo_spec.schema import LabelKey, ObjectName, ResourceName, Rule, Section


class DeviceConfig(Section):
    """Device that the ranks compute on."""

    type: Device = Field(Device.CUDA, description="cuda for GPUs; cpu for trials without GPUs.")
    resource_name: ResourceName | None = Field(
        None,
        description="Extended resource that stands for a GPU; each pod requests `gpus` of it. Default: nvidia.com/gpu "
        "for cuda, none for cpu.",
    )

    @property
    def resource(self) -> str | None:
        """Extended resource that pods request, or None."""
        return self.resource_name or ("nvidia.com/gpu" if self.type is Device.CUDA else None)


class TrainerGroup(GpuGroup):
    """Trainer pods of one kind, with one rank for each GPU.

    Groups may differ in GPUs; all ranks form one process group.
    """


class TrainerSpec(Section):
    """Pods that train."""

    groups: Annotated[tuple[TrainerGroup, ...], Field(min_length=1, max_length=32)] = Field(
        description="Groups of trainer pods, in rank order: the first pod of the first group has rank 0.",
        json_schema_extra=list_map("name"),
    )


class SchedulingSpec(Section):
    """Together or one by one, near each other or not, and how long pods that have a node wait for others."""

    RULES = (
        Rule(
            "self.topologyPolicy != 'Required' || has(self.topologyKey)",
            "topologyPolicy Required needs topologyKey, the node label that all pods must share",
            lambda s: s.topology_policy != "Required" or s.topology_key is not None,
        ),
    )

    timeout_seconds: int | None = Field(
        None,
        ge=1,
        le=86400,
        description="An attempt of which some pods have a node and others find none gives its GPUs back if no other "
        "pod gets a node for this many seconds, or up to 20 percent less: of two jobs that hold each other's GPUs, one "
        "then gives way first (PlacementTimeout). "
        "Default: rendezvous.timeoutSeconds, after which pods give up on those that are missing.",
    )
    gang: Literal["Native"] | None = Field(
        None,
        description="Native: Kubernetes' scheduler gives the pods of an attempt nodes all together, or none, so a job "
        "that waits holds no GPU. Set it where jobs compete for GPUs. Elastic engines are not counted: they come one "
        "by one. Needs Kubernetes 1.36 or 1.37 with gang scheduling switched on (docs/gpus-and-networks.md). Default: "
        "pods get nodes one by one.",
    )
    topology_key: LabelKey | None = Field(
        None,
        description="Label of nodes whose value says which of them are near each other, such as "
        "topology.kubernetes.io/zone or your label of racks: the job's pods look for nodes of one "
        "value. Set it where the network between values is slower.",
    )
    topology_policy: Literal["Preferred", "Required"] = Field(
        "Preferred",
        description="Required: a pod waits rather than take a node outside the topologyKey value of the first. "
        "Preferred: it takes any node if none is left there. Set Required where ranks that are further apart would be "
        "too slow, or have no network between them.",
    )


class NetworkSpec(Section):
    """Network between nodes."""

    RULES = (
        Rule(
            "self.rdmaCount == 1 || has(self.rdmaResource)",
            "rdmaCount needs rdmaResource, of which it is the number",
            lambda n: n.rdma_count == 1 or n.rdma_resource is not None,
        ),
    )

    fabric: Literal["Ethernet", "InfiniBand", "RoCE", "EFA"] | None = Field(
        None, description="Network that NCCL uses: sets its environment variables. Default: NCCL detects the network."
    )
    interface: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^\S+$")] | None = Field(
        None,
        description="Network interface for sockets of NCCL and gloo, for example eth0, or NCCL's list of prefixes. "
        "Set it where pods have several and the wrong one is taken.",
    )
    rdma_resource: ResourceName | None = Field(
        None,
        description="Extended resource of the RDMA device plugin, for example rdma/hca or vpc.amazonaws.com/efa. "
        "Default: no RDMA device.",
    )
    rdma_count: int = Field(1, ge=1, le=64, description="Number of RDMA devices that each pod requests.")


class RendezvousSpec(Section):
    """Ports and deadline for ranks to find each other."""

    RULES = (
        Rule("self.port != self.statusPort", "port and statusPort must differ", lambda r: r.port != r.status_port),
    )

    port: int = Field(
        29500,
        ge=1024,
        le=65535,
        description="Port of torch's TCPStore in rank 0's pod. Change it where it is taken, as with "
        "podTemplate.hostNetwork.",
    )
    status_port: int = Field(
        29501,
        ge=1024,
        le=65535,
        description="HTTP port of the launcher in every trainer pod: progress, readiness and metrics. Change it where "
        "it is taken, as with podTemplate.hostNetwork.",
    )
    timeout_seconds: int = Field(
        600,
        ge=10,
        le=86400,
        description="Seconds that pods wait for the next one to answer, that ranks wait for the next engine to load, "
        "that a collective operation of the ranks may take, and that a rank may sample no token while others wait for "
        "it. Sampling itself may take any time.",
    )


class CacheSpec(Section):
    """Cache for downloads of models and datasets."""

    RULES = (
        Rule(
            "!self.readOnly || has(self.claimName)",
            "readOnly needs claimName: without a claim, pods download into an emptyDir",
            lambda c: not c.read_only or c.claim_name is not None,
        ),
        Rule(
            "!self.prefetch || (has(self.claimName) && !self.readOnly)",
            "prefetch needs claimName, and not readOnly: what is downloaded must be there for later pods",
            lambda c: not c.prefetch or (c.claim_name is not None and not c.read_only),
        ),
    )

    claim_name: ObjectName | None = Field(
        None, description="PersistentVolumeClaim that all pods share; default: an emptyDir in each pod."
    )
    read_only: bool = Field(
        False,
        description="Mount the claim read-only. Set it for a claim that is ReadOnlyMany, which several pods may then "
        "share. It must hold the model and the files of the dataset already.",
    )
    prefetch: bool = Field(
        False,
        description="true: before the first attempt, a pod without GPUs downloads model.name and the datasets of the "
        "hub into the claim, so that no GPU waits for it. Set it for models that take minutes to download. Default: "
        "pods download what they need.",
    )
    prefetch_deadline_seconds: int = Field(
        21600,
        ge=60,
        le=31_536_000,
        description="Seconds after which the job fails if prefetch has not succeeded, however often it was tried. A "
        "suspension begins it again; what is downloaded stays. Raise it where the model takes longer.",
    )
