"""What stands in the way of an attempt, checked live before each one: names, claims, and a dry run of every child."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_operator.edge.cluster import Cluster, Object
from grpo_operator.edge.errors import ObstacleError
from grpo_operator.layout.admission import Allowed, find_fault
from grpo_operator.layout.topology import Job, Topology
from grpo_workload.spec.reasons import Reason


async def find_obstacle(
    cluster: Cluster, job: Job, topology: Topology, children: Sequence[Object], allowed: Allowed
) -> tuple[Reason, str] | None:
    """Return why an attempt with these children cannot begin (reason, message), or None."""
    if fault := find_fault(job, allowed):
        return Reason.INVALID_SPEC, fault
    try:
        if wrong := await _find_wrong_claim(cluster, job, topology):
            return wrong
        for child in children:
            await cluster.apply(child, dry_run=True)
    except ObstacleError as error:
        return error.reason, str(error)
    return None


async def _find_wrong_claim(cluster: Cluster, job: Job, topology: Topology) -> tuple[Reason, str] | None:
    for field, name, read_only in (
        ("storage", job.spec.storage.claim_name, False),
        ("cache", job.spec.cache.claim_name, job.spec.cache.read_only),
    ):
        if name is None:
            continue
        claim = await cluster.get("PersistentVolumeClaim", job.namespace, name)
        if claim is None:
            missing = f"namespace {job.namespace} has no PersistentVolumeClaim {name}; create it"
            return Reason.CLAIM_NOT_FOUND, f"spec.{field}.claimName: {missing}"
        modes = claim["spec"].get("accessModes", [])
        if wrong := wrong_mode(modes, pods=len(topology.pods), read_only=read_only):
            return Reason.CLAIM_NOT_SHARED, f"spec.{field}.claimName: PersistentVolumeClaim {name} {wrong}"
    return None


def wrong_mode(modes: Sequence[str], *, pods: int, read_only: bool) -> str | None:
    """Return why a claim with these access modes does not serve so many pods, trainer and engine pods, or None."""
    suitable = {"ReadWriteMany"} | ({"ReadOnlyMany"} if read_only else set())
    if pods == 1:
        suitable |= {"ReadWriteOnce", "ReadWriteOncePod"}
    if suitable & set(modes):
        return None
    use = "reads from it" if read_only else "writes to it"
    who = "1 pod" if pods == 1 else f"each of {pods} pods"
    return f"has the access modes {', '.join(modes)}, but {who} {use}; use a claim with {' or '.join(sorted(suitable))}"
