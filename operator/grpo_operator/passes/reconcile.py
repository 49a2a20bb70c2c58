"""One pass over one job: look, plan, look again if it matters, write the status once, change children, emit events.

jobs.py has all that is kept about a job between passes. The status is written before any child is touched, as a
compare-and-swap on the job's resourceVersion: if two operators plan at the same time, one gets a conflict and plans
again from what the other wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.status import read_status
from grpo_operator.api.times import whole_seconds
from grpo_operator.decide.attempts import is_about_to_begin, is_due, is_running_undisturbed, next_attempt
from grpo_operator.decide.blame import has_unexplained_pods, seems_hung
from grpo_operator.decide.conditions import holds, is_terminal, keeps_pods
from grpo_operator.decide.downloading import needs_job
from grpo_operator.decide.objects import labels_of, owner_of
from grpo_operator.decide.observe import observe, read_child, read_pods
from grpo_operator.decide.plan import Obstacle, Plan, plan
from grpo_operator.decide.queueing import is_new
from grpo_operator.decide.rescue import recovered, rescue
from grpo_operator.decide.scaling import Scale
from grpo_operator.decide.second_look import changes_course
from grpo_operator.layout.admission import Allowed
from grpo_operator.layout.downloads import download_job
from grpo_operator.layout.manifests import manifests
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.passes import kueue
from grpo_operator.passes.children import ChildApplier, ChildDiff, error_note, groups_to_stop
from grpo_operator.passes.jobs import Jobs, Round
from grpo_operator.passes.launchers import Launchers
from grpo_operator.passes.pass_log import log_conflict, log_pass, log_quiet
from grpo_operator.passes.preflight import find_obstacle
from grpo_operator.passes.quiet import QuietJobs
from grpo_operator.passes.read_job import read_job
from grpo_operator.passes.snapshot import Snapshot, SnapshotReader, children, is_ours
from grpo_operator.passes.status_writer import StatusWriter
from grpo_operator.runtime.applied import Applied
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.errors import ConflictError, ObstacleError, is_temporary, reason_of
from grpo_operator.runtime.kept import Key, Versions
from grpo_operator.runtime.mirror import Mirror
from grpo_operator.runtime.transport import Object
from grpo_spec.reasons import Reason
from grpo_spec.schema import dump

log = logging.getLogger(__name__)

DELETION_EVENT_SECONDS = 0.5
"""Seconds to the next pass while a pod is gone and the watch has not shown its deletion yet; the event wakes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """Options of passes.

    `read_nodes`: whether the nodes of silent pods are read. `network_policies`: whether jobs get a NetworkPolicy; if
    not, existing ones are deleted. `allowed`: what podTemplate may hold. `requests`: what pods of new jobs request.
    `site`: the kinds of what a site sets that hold for new jobs.
    """

    read_nodes: bool = True
    network_policies: bool = True
    allowed: Allowed = field(default_factory=Allowed)
    requests: PodRequests = field(default_factory=PodRequests)
    site: tuple[str, ...] = ()


class Reconciler:
    """Brings one job at a time closer to its spec."""

    def __init__(
        self,
        cluster: Cluster,
        mirror: Mirror,
        launchers: Launchers,
        jobs: Jobs,
        clock: Callable[[], datetime],
        instruments: Instruments,
        options: PassOptions,
    ) -> None:
        self._cluster, self._mirror, self._launchers = cluster, mirror, launchers
        self._jobs, self._clock, self._instruments = jobs, clock, instruments
        self._snapshots = SnapshotReader(
            cluster, mirror, jobs, read_nodes=options.read_nodes, requests=options.requests, site=options.site
        )
        self._statuses = StatusWriter(cluster, mirror, jobs, clock, instruments)
        self._options, self._quiet = options, QuietJobs(jobs, mirror, launchers)
        applied = Applied()
        self._diff = ChildDiff(applied, jobs, policies=options.network_policies)
        self._applier = ChildApplier(cluster, applied, mirror.keep)

    async def reconcile(self, key: Key) -> float | None:
        """Do one pass. Return the seconds until the next one is due, or None if only a change calls for it.

        Raises ConflictError if the mirror was behind, and whatever else made the pass fail; the queue tries again.
        Unless the API server is away or busy for the moment, the job's condition Blocked then names what failed.
        """
        versions, raw = self._mirror.versions(key), None
        if versions is not None:
            if (delay := self._quiet.look(key, versions)) is not None:
                log_quiet(key, delay)
                return delay
            raw = self._mirror.job(key)
        if versions is None or raw is None:
            self._jobs.forget(key)
            return None
        if not is_ours(raw):
            return None
        try:
            return await self._pass(key, raw, versions)
        except ConflictError as error:
            log_conflict(key, error)
            await self._snapshots.read(key)
            raise
        except Exception as error:
            if not is_temporary(error):
                await self._rescue(key, error)
            raise

    async def _pass(self, key: Key, raw: Object, versions: Versions) -> float | None:
        seen = await self._snapshots.mirrored(key, raw, self._now())
        begins = _begins(seen)
        obstacle = await self._find_obstacle(seen) if begins else None
        decided = self._plan(key, seen, obstacle)
        if is_live := changes_course(seen.status, decided):
            seen = await self._snapshots.live(key, seen)
            if self._misses_a_deletion(key, seen):
                log_pass(key, seen, obstacle, decided, None, written=False, delay=DELETION_EVENT_SECONDS)
                return DELETION_EVENT_SECONDS
            if _begins(seen) and not begins:
                begins, obstacle = True, await self._find_obstacle(seen)
            decided = self._plan(key, seen, obstacle)
            self._instruments.looked_again(confirmed=changes_course(seen.status, decided))
        delay, written = await self._statuses.write(key, seen.raw, seen.status, decided)
        try:
            changes = self._diff.find(key, seen.job, seen.topology, seen.observed, decided)
            if changes or decided.queue or decided.download:
                if not (written or is_live):
                    await self._snapshots.check_current(key, seen.raw)
                await self._applier.make(seen.job, seen.observed, changes)
            for answer in await kueue.make(self._cluster, seen.job, seen.topology, decided.queue):
                self._mirror.keep(answer)
            await self._download(seen, decided)
            if decided.scale is not None:
                await self._scale(key, decided.scale, seen.now)
        finally:
            await self._statuses.emit(seen.raw, decided if written else None, seen.now)
        is_recorded = written or decided.status == seen.status
        self._jobs.of(key).deleted_pods.recorded(seen.observed.gone if is_recorded else ())
        if not any(group.statefulset in decided.limits for group in seen.topology.groups if group.max_replicas is None):
            self._instruments.children_applied(key)
        if holds(decided.status, Condition.BLOCKED):
            await self._recover(key, seen)
        is_over = delay is None or is_terminal(decided.status)
        self._jobs.expect(key, runs=None if is_over else holds(decided.status, Condition.RUNNING))
        asked = self._follow(key, seen, decided)
        if not (delay is None or written or is_live or changes or obstacle or decided.queue or decided.download):
            self._quiet.note(key, versions, seen, decided, delay, asked)
        log_pass(key, seen, obstacle, decided, changes, written=written, delay=delay)
        return delay

    def _misses_a_deletion(self, key: Key, seen: Snapshot) -> bool:
        """Whether a pod has disappeared whose deletion event may still arrive."""
        unexplained = is_running_undisturbed(seen.job, seen.status) and has_unexplained_pods(seen.status, seen.observed)
        return unexplained and self._jobs.of(key).deleted_pods.may_still_arrive()

    async def _find_obstacle(self, seen: Snapshot) -> Obstacle | None:
        """Return why the attempt that is about to begin cannot, or None; checked live before each attempt."""
        if seen.job.fault is not None:
            return None
        with error_note("checking whether an attempt can begin"):
            attempt, policies = next_attempt(seen.status), self._options.network_policies
            created_for = seen.status.created_for if keeps_pods(seen.status) else attempt
            try:
                wanted = manifests(seen.job, seen.topology, attempt, created_for=created_for, policies=policies)
            except ValueError as error:
                return Obstacle(Reason.INVALID_POD_TEMPLATE, str(error))
            allowed = self._options.allowed
            found = await find_obstacle(self._cluster, seen.job, seen.topology, wanted, seen.observed, allowed)
        return None if found is None else Obstacle(*found)

    def _plan(self, key: Key, seen: Snapshot, obstacle: Obstacle | None) -> Plan:
        pods = [*seen.observed.pods.values(), *seen.observed.downloaders]
        reports = {} if is_terminal(seen.status) else self._launchers.reports(key, pods)
        with error_note("planning"):
            least = self._jobs.intervals.seconds(runs=holds(seen.status, Condition.RUNNING))
            return plan(seen.job, seen.topology, seen.status, seen.observed, reports, seen.now, obstacle, least)

    async def _download(self, seen: Snapshot, decided: Plan) -> None:
        """Create the Job that downloads, or delete it."""
        if decided.download.create:
            with error_note("creating the Job that downloads"):
                wanted = download_job(seen.job, seen.topology)
                self._mirror.keep(await self._cluster.create(wanted))
        for child in decided.download.removals:
            await self._cluster.delete(child.kind, seen.job.namespace, child.name, child.uid)

    async def _scale(self, key: Key, scale: Scale, now: datetime) -> None:
        """Change the number of elastic engines in the spec; the next pass acts on it."""
        if (latest := self._mirror.job(key)) is not None:
            await self._cluster.scale(latest, scale.replicas)
            await self._cluster.emit(latest, kind="Normal", reason=Reason.SCALED, message=scale.message, now=now)

    def _follow(self, key: Key, seen: Snapshot, decided: Plan) -> Round | None:
        """Ask launchers again shortly before the next pass is due, while pods may answer. Return what is asked."""
        there, delay = seen.observed.pods, decided.requeue_after
        pods = [there[member.pod] for member in seen.topology.members if member.pod in there]
        if decided.status.attempt is None and (asked := list(seen.observed.downloaders)) and delay is not None:
            port = seen.job.spec.rendezvous.status_port
            self._launchers.follow(key, Round(port, asked[-1:], lambda _: False), delay * 0.9)
            return None
        if is_terminal(decided.status) or delay is None or not pods or pods[0].name != seen.topology.members[0].pod:
            self._launchers.stop(key)
            return None
        policy, port = seen.job.spec.failure_policy, seen.job.spec.rendezvous.status_port
        question = Round(port, pods, lambda said: seems_hung(said, policy))
        self._launchers.follow(key, question, delay * 0.9)
        return question

    async def _rescue(self, key: Key, error: Exception) -> None:
        """Say on the job what failed, and do what can be done nevertheless; all of it from live reads."""
        raw = await self._snapshots.read(key)
        if raw is None:
            return
        status, now = read_status(raw.get("status")), self._now()
        job = read_job(key, raw, status)
        pods = await children(self._cluster, key, "Pod")
        sets = [
            (owner_of(one), read_child("StatefulSet", one)) for one in await children(self._cluster, key, "StatefulSet")
        ]
        read = read_pods(pods)
        observed = observe(
            key.uid,
            pods=read,
            others=sets,
            members={member.uid for member in status.members},
            gone_sets={pod.controller for _, pod in read} - {"", *(child.uid for _, child in sets)},
        )
        roles = {pod["metadata"]["name"]: labels_of(pod).get(names.LABEL_ROLE, "") for pod in pods}
        there = (*observed.pods, *observed.environment_pods)
        decided = rescue(job, status, {name: roles[name] for name in there}, _say(error), now)
        _, written = await self._statuses.write(key, raw, status, decided)
        await self._statuses.emit(raw, decided if written else None, now)
        await self._applier.stop(job, groups_to_stop(observed.children, decided.mode))

    async def _recover(self, key: Key, seen: Snapshot) -> None:
        """Clear `Blocked` after a pass that succeeded."""
        if (latest := self._mirror.job(key)) is not None:
            status = recovered(seen.job, read_status(latest.get("status")), seen.now)
            self._mirror.renew_job(await self._cluster.write_status(latest, dump(status)))

    def _now(self) -> datetime:
        return whole_seconds(self._clock())


def _begins(seen: Snapshot) -> bool:
    """Whether it must be checked that an attempt can begin: one does in this pass, or will once Kueue admits it."""
    job, status, observed = seen.job, seen.status, seen.observed
    if is_about_to_begin(job, status, observed, seen.now):
        return True
    asks = is_new(job, seen.topology, observed) or needs_job(job, status, observed)
    return asks and is_due(job, status, observed, seen.now)


def _say(error: Exception) -> Obstacle:
    """Return the reason and the message of `Blocked`."""
    what = "; ".join(getattr(error, "__notes__", ())) or "a pass over the job"
    if isinstance(error, ObstacleError):
        return Obstacle(error.reason, f"{what} failed, and is tried again: {error}")
    said = reason_of(error) if isinstance(error, ApiException) else error
    return Obstacle(Reason.PASS_FAILED, f"{what} failed with {type(error).__name__}, and is tried again: {said}")
