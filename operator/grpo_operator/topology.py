"""Who is where: a job's pods, their addresses and their ranks, computed once and read by everything that renders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_operator import names
from grpo_operator.api import GRPOJobSpec, TrainerGroup
from grpo_workload.contract import Contract, JobRef, Member


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One StatefulSet: pods that differ in their ordinal alone."""

    name: str
    statefulset: str
    spec: TrainerGroup
    rank_offset: int

    @property
    def pods(self) -> tuple[str, ...]:
        """Names of the pods by ordinal."""
        return tuple(f"{self.statefulset}-{ordinal}" for ordinal in range(self.spec.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All groups in rank order, and the members of the world."""

    groups: tuple[Group, ...]
    members: tuple[Member, ...]

    @property
    def world_size(self) -> int:
        """Ranks over all pods."""
        return sum(member.gpus for member in self.members)


def plan_topology(job: Job) -> Topology:
    """Place every rank: group after group, ordinal after ordinal, GPU after GPU, without gaps."""
    groups, members, rank = [], [], 0
    for spec in job.spec.trainer.groups:
        group = Group(name=spec.name, statefulset=names.child_name(job.name, spec.name), spec=spec, rank_offset=rank)
        groups.append(group)
        for pod in group.pods:
            members.append(
                Member(
                    pod=pod,
                    group=spec.name,
                    host=names.pod_host(pod, job.name, job.namespace),
                    status_port=job.spec.rendezvous.status_port,
                    gpus=spec.gpus,
                    rank_offset=rank,
                )
            )
            rank += spec.gpus
    return Topology(groups=tuple(groups), members=tuple(members))


def make_contract(job: Job, topology: Topology, epoch: int) -> Contract:
    """What every pod of the epoch is told."""
    return Contract(
        job=job.ref,
        epoch=epoch,
        device=job.spec.device.type,
        members=topology.members,
        master_port=job.spec.rendezvous.port,
        timeout_seconds=job.spec.rendezvous.timeout_seconds,
        durable=job.spec.storage.claim_name is not None,
        config=job.spec.trainer_config(),
    )
