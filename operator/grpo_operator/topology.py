"""Who is where: a job's pods, their addresses, their ranks, engines and devices, computed once and read by everything that renders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_operator import names
from grpo_operator.api import GRPOJobSpec, TrainerGroup
from grpo_operator.generationspec import GenerationGroup, NodeLocalSpec
from grpo_operator.names import Role
from grpo_operator.podtemplate import PodGroup
from grpo_workload.contract import Contract, Engine, JobRef, Member, TransferGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A GRPOJob with a valid spec, and what of its metadata matters."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: GRPOJobSpec

    @property
    def ref(self) -> JobRef:
        """The job as the contract names it."""
        return JobRef(namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def owner(self) -> dict[str, Any]:
        """The controller reference that every child carries; garbage collection needs no operator."""
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def host(self, pod: str) -> str:
        """Address of one of the job's pods."""
        return names.pod_host(pod, self.name, self.namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One StatefulSet: pods that differ in their ordinal alone."""

    role: Role
    statefulset: str
    spec: PodGroup

    @property
    def name(self) -> str:
        """Name of the group in the spec."""
        return self.spec.name

    @property
    def pods(self) -> tuple[str, ...]:
        """Names of the pods by ordinal."""
        return tuple(f"{self.statefulset}-{ordinal}" for ordinal in range(self.spec.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All groups, the members of the training world in rank order, and the engines with the groups that feed them."""

    groups: tuple[Group, ...]
    members: tuple[Member, ...]
    engines: tuple[Engine, ...] = ()
    transfers: tuple[TransferGroup, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks over all pods."""
        return sum(member.gpus for member in self.members)

    @property
    def pods(self) -> tuple[str, ...]:
        """Names of all pods, the trainer's first."""
        return tuple(pod for group in self.groups for pod in group.pods)

    @property
    def trainer_pods(self) -> frozenset[str]:
        """Names of the pods that train."""
        return frozenset(member.pod for member in self.members)


def plan_topology(job: Job) -> Topology:
    """Place every rank and every engine: group after group, ordinal after ordinal, device after device, without gaps."""
    spec = job.spec
    trainers = [_group(job, Role.TRAINER, group) for group in spec.trainer.groups]
    members = _members(job, trainers)
    if spec.generation.server is not None:
        generators = [_group(job, Role.GENERATION, group) for group in spec.generation.server.groups]
        engines, transfer = _server_engines(job, generators, members[0])
        return Topology(groups=(*trainers, *generators), members=members, engines=engines, transfers=(transfer,))
    if spec.generation.node_local is not None:
        engines, transfers = _node_local_engines(job, spec.generation.node_local, members, trainers)
        return Topology(groups=tuple(trainers), members=members, engines=engines, transfers=transfers)
    return Topology(groups=tuple(trainers), members=members)


def make_contract(job: Job, topology: Topology, epoch: int) -> Contract:
    """What every pod of the epoch is told."""
    return Contract(
        job=job.ref,
        epoch=epoch,
        device=job.spec.device.type,
        members=topology.members,
        engines=topology.engines,
        transfers=topology.transfers,
        master_port=job.spec.rendezvous.port,
        timeout_seconds=job.spec.rendezvous.timeout_seconds,
        restart_engines=job.spec.failure_policy.on_generation_failure == "RestartGeneration",
        durable=job.spec.storage.claim_name is not None,
        config=job.spec.trainer_config(),
    )


def _group(job: Job, role: Role, spec: TrainerGroup | GenerationGroup) -> Group:
    return Group(role=role, statefulset=names.child_name(job.name, spec.name), spec=spec)


def generation_devices(node_local: NodeLocalSpec | None, gpus: int) -> tuple[int, ...]:
    """Local devices that a trainer pod of `gpus` leaves to vLLM: those named, else the last ones."""
    if node_local is None:
        return ()
    return node_local.devices or tuple(range(gpus - node_local.gpus_per_node, gpus))


def _members(job: Job, groups: Sequence[Group]) -> tuple[Member, ...]:
    members, rank = [], 0
    for group in groups:
        kept = generation_devices(job.spec.generation.node_local, group.spec.gpus)
        devices = tuple(device for device in range(group.spec.gpus) if device not in kept)
        for pod in group.pods:
            members.append(
                Member(
                    pod=pod,
                    group=group.name,
                    host=job.host(pod),
                    status_port=job.spec.rendezvous.status_port,
                    gpus=len(devices),
                    rank_offset=rank,
                    devices=devices,
                )
            )
            rank += len(devices)
    return tuple(members)


def _server_engines(job: Job, groups: Sequence[Group], master: Member) -> tuple[tuple[Engine, ...], TransferGroup]:
    """One engine a pod, all in one transfer group: rank 0 sends once, whatever the number of engines."""
    server = job.spec.generation.server
    assert server is not None
    engines, rank = [], 1
    for group in groups:
        assert isinstance(group.spec, GenerationGroup)
        tensor_parallel = group.spec.tensor_parallel or job.spec.generation.tensor_parallel
        for pod in group.pods:
            engine = Engine(
                name=pod,
                pod=pod,
                group=group.name,
                host=job.host(pod),
                port=server.port,
                tensor_parallel=tensor_parallel,
                data_parallel=group.spec.gpus // tensor_parallel,
                devices=tuple(range(group.spec.gpus)),
                rank_offset=rank,
            )
            engines.append(engine)
            rank += engine.world_size
    return tuple(engines), TransferGroup(sender=0, host=master.host, port=server.transfer_port, world_size=rank)


def _node_local_engines(
    job: Job, spec: NodeLocalSpec, members: Sequence[Member], groups: Sequence[Group]
) -> tuple[tuple[Engine, ...], tuple[TransferGroup, ...]]:
    """Engines on the devices that each pod's ranks leave free, one transfer group a pod: its first rank sends."""
    gpus = {group.name: group.spec.gpus for group in groups}
    engines, transfers = [], []
    for number, member in enumerate(members):
        devices = generation_devices(spec, gpus[member.group])
        size = len(devices) // spec.engines_per_node
        for index in range(spec.engines_per_node):
            engines.append(
                Engine(
                    name=f"{member.pod}/{index}",
                    pod=member.pod,
                    group=member.group,
                    host=member.host,
                    port=spec.port + index,
                    tensor_parallel=size,
                    devices=devices[index * size : (index + 1) * size],
                    transfer=number,
                    rank_offset=1 + index * size,
                )
            )
        transfers.append(TransferGroup(sender=member.rank_offset, host=member.host, port=spec.transfer_port, world_size=1 + len(devices)))
    return tuple(engines), tuple(transfers)
