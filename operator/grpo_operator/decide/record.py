"""Record what one pass sees of an attempt: its pods, their outcomes, its groups and its progress. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.progress_status import EvaluationStatus, ExportStatus, ProgressStatus
from grpo_operator.api.status import Disruption, ElasticStatus, GroupStatus, GRPOJobStatus, MemberOutcome, MemberStatus
from grpo_operator.api.times import seconds_between
from grpo_operator.decide.attempts import is_running_undisturbed
from grpo_operator.decide.blame import EFFECTS, Reports, is_done
from grpo_operator.decide.conditions import Draft
from grpo_operator.decide.edits import edit
from grpo_operator.decide.environment_pods import is_ready
from grpo_operator.decide.failure_policy import was_refused
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.placement import record_placement
from grpo_operator.decide.restarts import forget_after_progress
from grpo_operator.decide.scaling import lacks_engines
from grpo_operator.layout.topology import Topology
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason

S = TypeVar("S", MemberOutcome, Disruption)

MESSAGES_BYTES = 32768
"""Bytes that the messages of all members may take together: a status has to fit into etcd however many pods fail. The
whole text of the failure that ended an attempt is in `lastFailure`."""

PROGRESS_SECONDS = 10
"""Seconds between two status writes for progress: a write at every step of a fast job would burden the API server."""


def record(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    """Record members, progress, groups and placement: some of it can be seen only now."""
    runs = is_running_undisturbed(draft.job, draft.status)
    draft.update(members=_members(topology, draft.status, observed, draft.now, runs=runs))
    _read_progress(draft, topology, observed, reports)
    forget_after_progress(draft)
    observe_groups(draft, topology, observed)
    if runs:
        record_placement(draft, topology, observed)


def is_finished(status: GRPOJobStatus, topology: Topology) -> bool:
    """Whether every trainer pod is done. How engines end does not matter then."""
    return topology.trainer_pods <= {member.pod for member in status.members if is_done(member.outcome)}


def _members(
    topology: Topology, status: GRPOJobStatus, observed: Observed, now: datetime, *, runs: bool
) -> tuple[MemberStatus, ...]:
    """Return the attempt's pods as first seen.

    A recorded outcome is never changed; pods of other attempts are left out, and until the attempt runs those that a
    kubelet refused: none of them has begun, and their StatefulSets create others.
    """
    begins = runs and status.running_time is None
    known = {member.pod: member for member in status.members}
    members: list[MemberStatus] = []
    limit = MESSAGES_BYTES // max(8, len(topology.pods))
    for group in topology.groups:
        for name in group.pods:
            pod, old = observed.pods.get(name), known.get(name)
            # An elastic engine that was removed and added again: its old pod still ends, which is no failure.
            is_leaving = old is None and pod is not None and pod.deletion_time and name not in group.needed_pods
            if pod is not None and pod.attempt == status.created_for and not is_leaving:
                old = _seen(old, pod, group.role, runs=runs)
            if old is not None and old.uid in observed.gone:
                old = _seen(old, observed.gone[old.uid], group.role, runs=runs)
            if old is None or (begins and was_refused(old.outcome)):
                continue
            outcome, disruption = _short(old.outcome, limit), _short(old.disruption, limit)
            was = known.get(name)
            if outcome is not None and (was is None or was.uid != old.uid or was.outcome is None):
                outcome = edit(outcome, finished_at=now)
            members.append(edit(old, outcome=outcome, disruption=disruption))
    return tuple(members)


def _short(said: S | None, limit: int) -> S | None:
    """Return an outcome or a disruption with its message cut to so many bytes."""
    return said and edit(said, message=clip(said.message, limit))


def _seen(old: MemberStatus | None, pod: ObservedPod, role: str, *, runs: bool) -> MemberStatus:
    if old is not None and old.uid != pod.uid and old.replacing and was_refused(pod.outcome):
        return old  # its StatefulSet tries again by itself
    if old is None or (old.uid != pod.uid and old.replacing):
        return MemberStatus(
            pod=pod.name,
            role=role,
            uid=pod.uid,
            node=pod.node,
            outcome=pod.outcome,
            disruption=pod.disruption,
            replace_time=old.replace_time if old else None,
            failures=old.failures if old else 0,
        )
    if old.uid != pod.uid:
        return old
    disruption, outcome = old.disruption or pod.disruption, old.outcome or pod.outcome
    failed = outcome is not None and outcome.exit_code not in EFFECTS  # before it was deleted
    if disruption is None and pod.deletion_time is not None and runs and not old.replacing and not failed:
        disruption = Disruption(reason=Reason.POD_REPLACED, message="a user or another controller deleted it")
    return edit(old, node=old.node or pod.node, outcome=outcome, disruption=disruption)


def _read_progress(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    name = topology.members[0].pod
    master = observed.pods.get(name)
    final = master.final_progress if master and master.attempt == draft.status.created_for else None
    newest, old = final or reports.get(name), draft.status.progress
    if newest is None or newest.total_steps == 0:
        return
    shown, known = draft.status.progress, draft.status.evaluation
    is_cut = final is not None and not final.metrics  # a long message leaves room for no more than the steps
    evaluation = known if is_cut else EvaluationStatus.read(newest.evaluation)
    if old is not None and draft.status.attempt_start_time and old.time < draft.status.attempt_start_time:
        old = None  # of an earlier attempt
    export = ExportStatus.read(newest.export) or draft.status.export
    is_same = old is not None and (old.step, old.checkpoint_step) == (newest.step, newest.checkpoint_step)
    if is_same and (known, draft.status.export) == (evaluation, export):
        return
    something_failed = any(one.outcome and not is_done(one.outcome) for one in draft.status.members)
    is_early = old is not None and seconds_between(old.time, draft.now) < PROGRESS_SECONDS
    if is_early and final is None and not something_failed:  # at which step it failed is to be known
        return
    if shown is not None and is_cut:
        progress = edit(shown, step=newest.step, checkpoint_step=newest.checkpoint_step, time=draft.now)
        draft.update(progress=progress, checkpoint=newest.checkpoint or draft.status.checkpoint, export=export)
        return
    progress = ProgressStatus.read(newest, draft.now)
    if lacks_engines(topology, progress.metrics):  # the advice counts from those that sample
        progress = edit(progress, advice=None)
    draft.update(
        progress=progress,
        evaluation=evaluation,
        checkpoint=newest.checkpoint or draft.status.checkpoint,
        export=export,
    )
    # Kept when the job ends: a run can be Complete and have learned nothing.
    if newest.warnings:
        message = "; ".join(warning.message for warning in newest.warnings)
        draft.set(Condition.DEGRADED, True, newest.warnings[0].reason, message)
    else:
        draft.clear(Condition.DEGRADED, Reason.STEPS_IN_ORDER, "the last steps show nothing unusual")


def observe_groups(draft: Draft, topology: Topology, observed: Observed) -> None:
    """Record how many pods each group has and how many are ready."""
    incarnations = {group.name: group.incarnation for group in draft.status.groups}
    ready = {pod.name for pod in observed.pods.values() if pod.ready and pod.attempt == draft.status.created_for}
    ready |= {pod.name for pod in observed.environment_pods.values() if is_ready(pod)}
    groups = tuple(
        GroupStatus(
            name=group.name,
            role=group.role,
            desired=group.spec.replicas,
            ready=len(ready & set(group.pods)),
            incarnation=incarnations.get(group.name, 0),
        )
        for group in (*topology.groups, *topology.environment_groups)
    )
    draft.update(groups=groups, elastic=_elastic_status(draft, topology, observed))


def _elastic_status(draft: Draft, topology: Topology, observed: Observed) -> ElasticStatus | None:
    group = next((group for group in topology.groups if group.max_replicas is not None), None)
    if group is None:
        return None
    selector = f"{names.LABEL_JOB_UID}={draft.job.uid},{names.LABEL_GROUP}={group.name}"
    existing = sum(pod.group == group.name for pod in observed.pods.values())
    return ElasticStatus(replicas=existing, selector=selector)
