"""Bring a job's children to what a plan wants: delete pods, apply objects, stop groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from grpo_operator.api import names
from grpo_operator.api.names import Role
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.plan import Mode, Plan
from grpo_operator.edge.cluster import Cluster, Object
from grpo_operator.layout.manifests import manifests
from grpo_operator.layout.topology import Job, Topology


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Note on an exception what the pass was doing."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


async def change_children(
    cluster: Cluster, job: Job, topology: Topology, observed: Observed, decided: Plan, *, policies: bool
) -> None:
    """Delete pods. While an attempt runs, apply its children and delete those that it does not want.

    Otherwise stop the groups, which does not depend on the spec.
    """
    for pod in decided.deletions:
        await cluster.delete("Pod", job.namespace, pod.pod, pod.uid, force=pod.force)
    if decided.delete_job:
        await cluster.delete(names.KIND, job.namespace, job.name, job.uid)
    sets = [child.raw for child in observed.children if child.kind == "StatefulSet"]
    await stop_groups(cluster, job, sets, decided.mode)
    if decided.mode != Mode.RUN or decided.status.attempt is None or job.fault is not None:
        return
    avoid = [node.name for node in decided.status.avoid_nodes]
    with doing("building the job's objects"):
        wanted = manifests(job, topology, decided.status.attempt, avoid, policies=policies)
    seen = {(child.kind, child.name): child.raw for child in observed.children}
    for manifest in wanted:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        with doing(f"applying {kind} {name}"):
            await cluster.apply(manifest, seen=seen.get((kind, name)))
    # Not wanted: contracts of earlier attempts, groups removed from the spec during a suspension, a NetworkPolicy
    # switched off.
    kept = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted}
    for child in observed.children:
        if (child.kind, child.name) not in kept:
            await cluster.delete(child.kind, job.namespace, child.name, child.uid)


async def stop_groups(cluster: Cluster, job: Job, sets: Sequence[Object], mode: Mode) -> None:
    """Scale those of these StatefulSets to 0 that are the job's and that should have no pods in this mode."""
    for one in sets if mode in (Mode.STOPPED, Mode.ENGINES_ONLY) else ():
        metadata, labels = one["metadata"], one["metadata"]["labels"]
        stays = mode == Mode.ENGINES_ONLY and labels.get(names.LABEL_ROLE) == Role.GENERATION
        if labels.get(names.LABEL_JOB_UID) == job.uid and not stays and one["spec"].get("replicas") != 0:
            with doing(f"stopping StatefulSet {metadata['name']}"):
                await cluster.stop_statefulset(job.namespace, metadata["name"], metadata["uid"])
