"""Compute which pods a job has, with their addresses, ranks, engines and GPUs, once for everything that needs it.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_operator.api import names
from grpo_operator.api.generation import ElasticSpec, GenerationGroup, NodeLocalSpec
from grpo_operator.api.names import Role
from grpo_operator.api.pod_template import GroupSpec
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job
from grpo_spec.contract import Engine, Follower, Member, TransferGroup


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All pod groups, the trainer pods in rank order, the engines, and the transfer groups that send them weights.

    `groups` are those of an attempt. Environment pods belong to none: they stay while one follows another.
    """

    groups: tuple[Group, ...]
    members: tuple[Member, ...]
    engines: tuple[Engine, ...] = ()
    transfers: tuple[TransferGroup, ...] = ()
    environment_groups: tuple[Group, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks in all trainer pods."""
        return sum(member.gpus for member in self.members)

    @cached_property
    def pods(self) -> tuple[str, ...]:
        """Names of all pods, trainer pods first."""
        return tuple(pod for group in self.groups for pod in group.pods)

    @cached_property
    def needed_pods(self) -> tuple[str, ...]:
        """Names of the pods without which the job does not run, trainer pods first."""
        return tuple(pod for group in self.groups for pod in group.needed_pods)

    @cached_property
    def elastic_pods(self) -> tuple[str, ...]:
        """Names of the other pods that the spec asks for."""
        return tuple(pod for group in self.groups for pod in group.pods[len(group.needed_pods) :])

    @cached_property
    def elastic_groups(self) -> tuple[Group, ...]:
        """Groups whose number of pods may change while the job runs."""
        return tuple(group for group in self.groups if group.max_replicas is not None)

    @cached_property
    def environment_pods(self) -> tuple[str, ...]:
        """Names of the pods in which tools and environments run."""
        return tuple(pod for group in self.environment_groups for pod in group.pods)

    @cached_property
    def gang_pods(self) -> tuple[str, ...]:
        """Names of the pods that get nodes together, if any do."""
        return tuple(pod for group in self.groups if group.in_gang for pod in group.pods)

    def partners(self, pod: str) -> tuple[str, ...]:
        """Return the names of the other pods of the engine that runs in this pod, which cannot run without it."""
        engine = next((one for one in self.engines if pod in one.pods), None)
        return tuple(other for other in engine.pods if other != pod) if engine else ()

    @cached_property
    def trainer_pods(self) -> frozenset[str]:
        """Names of the pods that train."""
        return frozenset(member.pod for member in self.members)

    def limited(self, pods: Mapping[str, int]) -> Topology:
        """Return this topology with at most so many pods in each of these StatefulSets."""

        def limit(group: Group) -> Group:
            most = pods.get(group.statefulset, group.spec.replicas)
            if group.spec.replicas <= most:
                return group
            return replace(group, spec=group.spec.model_copy(update={"replicas": most}))

        return replace(self, groups=tuple(map(limit, self.groups)))


def plan_topology(job: Job) -> Topology:
    """Place every rank and every engine: group by group, pod by pod, GPU by GPU, without gaps."""
    served = job.spec.environment_pods.groups if job.spec.environment_pods else ()
    environments = tuple(_group(job, Role.ENVIRONMENT, group) for group in served)
    planned = replace(_plan_topology(job), environment_groups=environments)
    if job.spec.scheduling.gang is None:
        return planned
    # Elastic engines would stand in for missing others.
    return replace(
        planned, groups=tuple(replace(group, in_gang=group.max_replicas is None) for group in planned.groups)
    )


def _plan_topology(job: Job) -> Topology:
    spec = job.spec
    trainers = [_group(job, Role.TRAINER, group) for group in spec.trainer.groups]
    members = _members(job, trainers)
    if spec.generation.server is not None:
        first, *others = spec.generation.server.groups
        # Where engines of other groups stay, all elastic ones may leave: a scheduler takes any of one priority.
        least = 0 if others else 1
        generators = [_elastic_group(job, first, spec.generation.server.elastic, least)]
        generators += [_group(job, Role.GENERATION, group) for group in others]
        engines, transfer = _server_engines(job, generators, members[0])
        return Topology(groups=(*trainers, *generators), members=members, engines=engines, transfers=(transfer,))
    if spec.generation.node_local is not None:
        engines, transfers = _node_local_engines(job, spec.generation.node_local, members, trainers)
        return Topology(groups=tuple(trainers), members=members, engines=engines, transfers=transfers)
    return Topology(groups=tuple(trainers), members=members)


def _group(job: Job, role: Role, spec: GroupSpec) -> Group:
    return Group(role=role, statefulset=names.child_name(job.name, spec.name), spec=spec)


def _elastic_group(job: Job, spec: GenerationGroup, elastic: ElasticSpec | None, least: int) -> Group:
    group = _group(job, Role.GENERATION, spec)
    if elastic is None:
        return group
    scaled = spec.model_copy(update={"replicas": elastic.replicas})
    return replace(group, spec=scaled, max_replicas=elastic.max_replicas, min_replicas=least)


def generation_devices(node_local: NodeLocalSpec | None, gpus: int) -> tuple[int, ...]:
    """Return the indices of the GPUs that vLLM uses in a trainer pod of `gpus` GPUs: the spec's, else the last ones."""
    if node_local is None:
        return ()
    return node_local.devices or tuple(range(gpus - node_local.gpus_per_node, gpus))


def _members(job: Job, groups: Sequence[Group]) -> tuple[Member, ...]:
    members, rank = [], 0
    for group in groups:
        kept = generation_devices(job.spec.generation.node_local, group.gpus)
        devices = tuple(device for device in range(group.gpus) if device not in kept)
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
    """Return an engine for each pod, or `podsPerEngine`, that may exist: the contract is the same for any number.

    All are in one transfer group: rank 0 sends once, however many engines there are.
    """
    server = job.spec.generation.server
    assert server is not None
    engines = []
    for group in groups:
        assert isinstance(group.spec, GenerationGroup)
        tensor_parallel = group.spec.tensor_parallel or job.spec.generation.tensor_parallel
        needed = set(group.needed_pods)
        size = group.spec.pods_per_engine
        copies = group.spec.gpus * size // tensor_parallel  # stages of one copy if it takes several pods
        pods = group.possible_pods
        for pod, *others in (pods[start : start + size] for start in range(0, len(pods), size)):
            engine = Engine(
                name=pod,
                pod=pod,
                group=group.name,
                host=job.host(pod),
                port=server.port,
                followers=tuple(Follower(pod=other, port=server.port) for other in others),
                meeting_port=job.spec.rendezvous.port,
                tensor_parallel=tensor_parallel,
                pipeline_parallel=copies if others else 1,
                data_parallel=1 if others else copies,
                devices=tuple(range(group.spec.gpus)),
                elastic=pod not in needed,
            )
            engines.append(engine)
    return tuple(engines), TransferGroup(sender=0, host=master.host, port=server.transfer_port)


def _node_local_engines(
    job: Job, spec: NodeLocalSpec, members: Sequence[Member], groups: Sequence[Group]
) -> tuple[tuple[Engine, ...], tuple[TransferGroup, ...]]:
    """Return the engines next to each pod's ranks. Each pod is a transfer group, in which its first rank sends."""
    gpus = {group.name: group.gpus for group in groups}
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
                )
            )
        transfers.append(TransferGroup(sender=member.rank_offset, host=member.host, port=spec.transfer_port))
    return tuple(engines), tuple(transfers)
