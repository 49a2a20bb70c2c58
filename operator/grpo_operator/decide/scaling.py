"""The number of elastic engines that a job should have, from reports of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_operator.api.names import Condition, Role
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.conditions import holds
from grpo_operator.decide.observe import Observed
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_spec.words import counted

BALANCED = "engines/balanced"
"""Metric of a step: the number of engines with which neither they nor ranks wait. Ranks keep it steady."""
SAMPLING = "engines/count"
"""Metric of a step: the number of engines that sampled."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A change of `generation.server.elastic.replicas`."""

    replicas: int
    message: str


def find_scale(job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed) -> Scale | None:
    """Return the number of elastic engines that the spec should ask for, or None if it should stay.

    More are asked for only when all that were asked for before are ready and sample. Ranks propose no more than twice
    the engines that sample: if others are missing, that may be fewer than were asked for, though more than there are.
    """
    elastic = job.spec.generation.server.elastic if job.spec.generation.server else None
    if elastic is None or elastic.min_replicas is None or status.progress is None:
        return None
    if job.spec.suspend or not holds(status, Condition.RUNNING) or BALANCED not in status.progress.metrics:
        return None
    total = round(status.progress.metrics[BALANCED])
    others = sum(
        len(group.pods) for group in topology.groups if group.max_replicas is None and group.role == Role.GENERATION
    )
    wanted = max(elastic.min_replicas, min(elastic.max_replicas, total - others))
    all_ready = all(name in observed.pods and observed.pods[name].ready for name in topology.pods)
    metrics = status.progress.metrics
    if wanted == elastic.replicas or (wanted > elastic.replicas and not all_ready):
        return None
    if total > metrics.get(SAMPLING, total) and lacks_engines(topology, metrics):
        return None
    limits = f"{elastic.min_replicas} to {elastic.max_replicas} are allowed"
    become = counted(elastic.replicas, "elastic engine becomes", "elastic engines become")
    message = f"{become} {wanted}: {counted(total, 'engine')} would balance the ranks ({limits})"
    return Scale(wanted, message)


def lacks_engines(topology: Topology, metrics: Mapping[str, float]) -> bool:
    """Return whether fewer engines sampled than pods of engines were asked for: lost, late, or left out of pushes."""
    asked = sum(len(group.pods) for group in topology.groups if group.role == Role.GENERATION)
    return metrics.get(SAMPLING, asked) < asked
