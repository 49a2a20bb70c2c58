"""Obstacles to an attempt, checked live before each one: names, claims, and a dry run of every group."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_operator.api import names
from grpo_operator.decide.objects import controller_of
from grpo_operator.decide.observe import Observed
from grpo_operator.layout.admission import Allowed, find_fault
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_operator.passes.children import gather_all
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import EarlyError, ObstacleError
from grpo_operator.runtime.ownership import describe_foreign
from grpo_operator.runtime.transport import Object
from grpo_spec.reasons import Reason

_NO_CLAIMS = (
    f"resourceClaimTemplateName: the API server does not serve {names.api_version('ResourceClaimTemplate')}, which "
    "Kubernetes has from 1.34 on; leave it out to ask for the extended resource of device.resourceName"
)


async def find_obstacle(
    cluster: Cluster,
    job: Job,
    topology: Topology,
    wanted: Sequence[Object],
    observed: Observed,
    allowed: Allowed,
) -> tuple[Reason, str] | None:
    """Return why an attempt cannot begin (reason, message), or None.

    `wanted`: the children that it needs; `observed`: those that the job has.
    """
    if fault := find_fault(job, allowed):
        return Reason.INVALID_SPEC, fault
    for name in sorted({*topology.pods, *topology.environment_pods} & {*observed.strange_pods}):
        if taken := await find_taken(cluster, job.namespace, name, observed):
            return Reason.NAME_TAKEN, taken
    ours = {(child.kind, child.name) for child in observed.children}
    try:
        if wrong := await _find_wrong_claim(cluster, job, topology) or await _find_missing_template(
            cluster, job, topology
        ):
            return wrong
        await gather_all(
            _check(cluster, child, is_ours=(child["kind"], child["metadata"]["name"]) in ours) for child in wanted
        )
    except EarlyError:  # says nothing about the job
        raise
    except ObstacleError as error:
        return error.reason, str(error)
    return None


async def find_taken(cluster: Cluster, namespace: str, pod: str, observed: Observed) -> str | None:
    """Say whose the pod of a name is that the job needs; None if it does not exist, or is the job's."""
    live = await cluster.find("Pod", namespace, pod)
    if live is None or controller_of(live).get("uid") in {child.uid for child in observed.children}:
        return None
    return describe_foreign("Pod", live)


async def _check(cluster: Cluster, child: Object, *, is_ours: bool) -> None:
    if child["kind"] == "StatefulSet":  # which podTemplate shapes; it has the labels of all others
        await cluster.try_apply(child, is_ours=is_ours)
    elif not is_ours and child["kind"] not in names.KINDS_OF_AN_ATTEMPT:  # to create these shows whose the name is
        await cluster.check_owner(child)


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


async def _find_missing_template(cluster: Cluster, job: Job, topology: Topology) -> tuple[Reason, str] | None:
    """Return which ResourceClaimTemplate does not exist. The scheduler would leave pods waiting, and not say why."""
    for name in sorted({group.claim_template or "" for group in topology.groups} - {""}):
        if await cluster.get("ResourceClaimTemplate", job.namespace, name) is None:
            if not await cluster.serves("ResourceClaimTemplate"):
                return Reason.INVALID_SPEC, _NO_CLAIMS
            missing = f"namespace {job.namespace} has no ResourceClaimTemplate {name}; create it"
            return Reason.CLAIM_NOT_FOUND, f"resourceClaimTemplateName: {missing}"
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
