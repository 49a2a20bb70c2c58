"""Bring a job's children to what a plan wants: delete pods, apply objects, stop groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from grpo_operator.api import names
from grpo_operator.api.names import Role
from grpo_operator.decide.objects import labels_of
from grpo_operator.decide.observe import Child, Observed, is_being_deleted, read_child
from grpo_operator.decide.plan import Mode, Plan
from grpo_operator.layout.job import Job
from grpo_operator.layout.manifests import manifests
from grpo_operator.layout.topology import Topology
from grpo_operator.passes.jobs import Jobs
from grpo_operator.runtime.applied import Applied, contains
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.transport import Object


@contextmanager
def error_note(what: str) -> Iterator[None]:
    """Note on an exception what the pass was doing."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences between a job's children and a plan."""

    plan: Plan
    stops: Sequence[Child] = ()
    applies: Sequence[Object] = ()
    removals: Sequence[Child] = ()

    def __bool__(self) -> bool:
        plan = self.plan
        return bool(self.stops or self.applies or self.removals or plan.deletions or plan.delete_job or plan.renewals)


class ChildDiff:
    """Finds what to change. If that was nothing for a job, the next pass over it builds no objects.

    `policies`: whether jobs get a NetworkPolicy.
    """

    def __init__(self, applied: Applied, jobs: Jobs, *, policies: bool) -> None:
        self._applied, self._jobs, self._policies = applied, jobs, policies

    def find(self, key: Key, job: Job, topology: Topology, observed: Observed, decided: Plan) -> Changes:
        """Return what separates the job's children from a plan."""
        status, state = decided.status, self._jobs.of(key)
        of_plan = decided.mode, status.attempt, status.created_for, status.avoid_nodes, decided.limits
        of_job = job.generation, job.fault, job.micro_batch_halvings, job.queue, job.admission
        basis = *of_job, *of_plan, *observed.children  # nearly always the same objects, and so quickly compared
        if state.in_force == basis:
            return Changes(decided)
        state.in_force = None
        changes = _find_changes(job, topology, observed, decided, self._applied, policies=self._policies)
        if not (changes.stops or changes.applies or changes.removals):
            state.in_force = basis
        return changes


def _find_changes(
    job: Job, topology: Topology, observed: Observed, decided: Plan, applied: Applied, *, policies: bool
) -> Changes:
    """Return what to change. While an attempt runs, its children are applied, and those not needed any more deleted.

    Otherwise groups are stopped, which does not depend on the spec.
    """
    stops = groups_to_stop(observed.children, decided.mode)
    status = decided.status
    if decided.mode != Mode.RUN or status.attempt is None or job.fault is not None:
        return Changes(decided, stops)
    avoid = [node.name for node in status.avoid_nodes]
    with error_note("building the job's objects"):
        now = topology.limited(decided.limits)
        wanted = manifests(job, now, status.attempt, avoid, created_for=status.created_for, policies=policies)
    seen = {(child.kind, child.name): child for child in observed.children}
    places = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted]
    applies = [
        manifest
        for place, manifest in zip(places, wanted, strict=True)
        if ((child := seen.get(place)) is None or not applied.is_in_force(manifest, child.raw))
        and not (place[0] == "StatefulSet" and decided.limits.get(place[1]) == 0)
    ]
    # Not wanted: contracts of earlier attempts, groups removed from the spec during a suspension, a NetworkPolicy
    # switched off.
    # decide/queueing.py and decide/downloading.py say what becomes of these.
    others = [child for child in observed.children if child.kind not in (names.QUEUE_KIND, "Job")]
    removals = [child for child in others if (child.kind, child.name) not in places and not is_being_deleted(child)]
    return Changes(decided, stops, applies, removals)


_STAY = {
    Mode.STOPPED: (),
    Mode.ENGINES_ONLY: (Role.GENERATION, Role.ENVIRONMENT),
    Mode.ENVIRONMENTS_ONLY: (Role.ENVIRONMENT,),
}
"""Roles whose groups stay, in the modes in which others are stopped."""


def groups_to_stop(children: Sequence[Child], mode: Mode) -> list[Child]:
    """Return the StatefulSets among these children that should have no pods in this mode and are not at 0 yet."""
    if mode not in _STAY:
        return []
    return [
        child
        for child in children
        if child.kind == "StatefulSet"
        and child.raw["spec"].get("replicas") != 0
        and labels_of(child.raw).get(names.LABEL_ROLE) not in _STAY[mode]
    ]


class ChildApplier:
    """Makes changes, and hands each answer to `seen`."""

    def __init__(self, cluster: Cluster, applied: Applied, seen: Callable[[Object], None]) -> None:
        self._cluster, self._applied, self._seen = cluster, applied, seen

    async def make(self, job: Job, observed: Observed, changes: Changes) -> None:
        """Make the changes."""
        for one in changes.plan.deletions:
            await self._cluster.delete(one.kind, job.namespace, one.name, one.uid, force=one.force)
        if changes.plan.delete_job:
            await self._cluster.delete(names.KIND, job.namespace, job.name, job.uid)
        await self.stop(job, changes.stops)
        ours = {(child.kind, child.name): child for child in observed.children}
        # Pods need what their groups share, so that comes first.
        for stage in (_shared, _groups):
            await gather_all(
                self._apply(one, ours.get((one["kind"], one["metadata"]["name"])))
                for one in changes.applies
                if stage(one)
            )
        for child in changes.removals:
            await self._cluster.delete(child.kind, job.namespace, child.name, child.uid)
        attempt = changes.plan.status.attempt
        await gather_all(  # only now: the contract is the one of this attempt
            self._cluster.announce(job.namespace, name, uid, attempt) for name, uid in changes.plan.renewals
        )

    async def stop(self, job: Job, groups: Sequence[Child]) -> None:
        """Scale these StatefulSets of the job to 0."""
        await gather_all(self._stop(job.namespace, child) for child in groups)

    async def _stop(self, namespace: str, child: Child) -> None:
        with error_note(f"stopping StatefulSet {child.name}"):
            answer = await self._cluster.stop_statefulset(namespace, child.name, child.uid)
        if answer is not None:
            self._seen(answer)

    async def _apply(self, manifest: Object, there: Child | None) -> None:
        with error_note(f"applying {manifest['kind']} {manifest['metadata']['name']}"):
            if there is None:
                answer, is_new = await self._cluster.find_or_create(manifest)
                # What is new is what the API server makes of the manifest. The mirror may not have shown the other.
                if not (is_new or self._applied.is_in_force(manifest, answer)):
                    there = read_child(manifest["kind"], answer)
                elif not (is_new or contains(labels_of(answer), manifest["metadata"]["labels"])):  # others took them
                    answer = await self._cluster.relabel(manifest, answer["metadata"]["uid"]) or answer
            if there is not None:
                answer = await self._cluster.apply(manifest, there.uid, was_applied=there.was_applied)
        self._applied.remember(manifest, answer)
        self._seen(answer)


def _shared(manifest: Object) -> bool:
    return bool(manifest["kind"] != "StatefulSet")


def _groups(manifest: Object) -> bool:
    return not _shared(manifest)


async def gather_all(requests: Iterator[Awaitable[None]]) -> None:
    """Await all requests, then raise the first one's error if any failed."""
    for result in await asyncio.gather(*requests, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
