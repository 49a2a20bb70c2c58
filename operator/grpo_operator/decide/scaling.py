"""How many elastic engines a job should have, from what its ranks report. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.conditions import holds
from grpo_operator.decide.observe import Observed
from grpo_operator.layout.topology import Job, Topology

BALANCED = "engines/balanced"
"""Metric of a step: the number of engines with which neither they nor ranks wait. Ranks keep it steady."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A change of `generation.server.elastic.replicas`."""

    replicas: int
    message: str


def find_scale(job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed) -> Scale | None:
    """Return the number of elastic engines that the spec should ask for, or None if it should stay.

    More are asked for only when all that were asked for before are ready.
    """
    elastic = job.spec.generation.server.elastic if job.spec.generation.server else None
    if elastic is None or elastic.min_replicas is None or status.progress is None:
        return None
    if job.spec.suspend or not holds(status, Condition.RUNNING) or BALANCED not in status.progress.metrics:
        return None
    total = round(status.progress.metrics[BALANCED])
    others = sum(len(group.pods) for group in topology.groups if group.most is None and group.role == "generation")
    wanted = max(elastic.min_replicas, min(elastic.max_replicas, total - others))
    all_ready = all(name in observed.pods and observed.pods[name].ready for name in topology.pods)
    if wanted == elastic.replicas or (wanted > elastic.replicas and not all_ready):
        return None
    limits = f"{elastic.min_replicas} to {elastic.max_replicas} are allowed"
    message = f"{elastic.replicas} elastic engines become {wanted}: {total} engines would balance the ranks ({limits})"
    return Scale(wanted, message)
