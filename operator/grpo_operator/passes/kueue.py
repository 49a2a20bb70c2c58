"""The operator's reads and writes for jobs in a queue of Kueue."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_operator.api.placement_status import Admission
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.queueing import QueueSteps, find_admitted
from grpo_operator.layout.job import Job
from grpo_operator.layout.queueing import flavors, read_admission, workload
from grpo_operator.layout.topology import Topology
from grpo_operator.passes.children import error_note
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ConflictError, ObstacleError
from grpo_operator.runtime.transport import Object
from grpo_spec.reasons import Reason


async def read_granted(cluster: Cluster, job: Job, topology: Topology, observed: Observed) -> Admission | None:
    """Return what Kueue admits a job with that is between attempts; None while it waits, and without a queue.

    Raises ConflictError if Kueue changed a resource flavor meanwhile.
    """
    found = find_admitted(job, topology, observed) if job.queue is not None else None
    if found is None:
        return None
    made = {}
    for name in sorted(flavors(found.raw)):
        with error_note(f"reading ResourceFlavor {name}"):
            flavor = await cluster.get("ResourceFlavor", "", name)
        if flavor is None:
            raise ConflictError(f"ResourceFlavor {name} of Workload {found.name} does not exist")
        made[name] = flavor
    return read_admission(found.raw, made)


async def make(cluster: Cluster, job: Job, topology: Topology, steps: QueueSteps) -> list[Object]:
    """Bring a job's Workloads to what a plan wants; return the API server's answers.

    Raises ConflictError if one changed since.
    """
    for one in steps.removals:
        await cluster.delete(one.kind, job.namespace, one.name, one.uid)
    answers = []
    for one, status in steps.patches:
        with error_note(f"writing the status of Workload {one.name}"):
            answers.append(await cluster.patch_status(one.kind, one.raw["metadata"], status))
    if steps.create:
        wanted = workload(job, topology)
        with error_note(f"creating Workload {wanted['metadata']['name']}"):
            wanted["spec"] |= await _priority(cluster, job, wanted["spec"]["podSets"][: len(topology.groups)])
            answers.append(await cluster.create(wanted))
    return answers


async def _priority(cluster: Cluster, job: Job, sets: Sequence[Object]) -> Object:
    """Return a Workload's priority: that of the job's class for queues, else of its pods' PriorityClass.

    `sets`: pod sets of the attempt's groups. Environment pods may have a low priority, which is not the job's.
    """
    of_pods = (one["template"]["spec"].get("priorityClassName") for one in sets)
    if job.queue is not None and job.queue.priority_class is not None:
        group, kind, name = "kueue.x-k8s.io", "WorkloadPriorityClass", job.queue.priority_class
    elif first := next(filter(None, of_pods), None):
        group, kind, name = "scheduling.k8s.io", "PriorityClass", first
    else:
        return {}
    found = await cluster.get(kind, "", name)
    if found is None:
        raise ObstacleError(Reason.INVALID_SPEC, f"{kind} {name} does not exist; create it, or name another one")
    return {"priority": found["value"], "priorityClassRef": {"group": group, "kind": kind, "name": name}}
