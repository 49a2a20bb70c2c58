"""Record what one pass sees of an attempt: its pods, their outcomes, its progress, `Scheduled` and `Running`. Pure."""

from __future__ import annotations

from typing import TypeVar

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.progress_status import EvaluationStatus, ProgressStatus
from grpo_operator.api.status import Disruption, ElasticStatus, GroupStatus, GRPOJobStatus, MemberOutcome, MemberStatus
from grpo_operator.decide.attempts import is_between_attempts, is_running_undisturbed
from grpo_operator.decide.blame import EFFECTS, Reports, is_done, seconds_between
from grpo_operator.decide.conditions import Draft, is_terminal, keeps_pods, rests
from grpo_operator.decide.edits import edit
from grpo_operator.decide.lifecycle import after, describe_leaving, leaving
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.placement import describe_hold, find_obstacle, pods_of_attempt, record_placement
from grpo_operator.decide.scaling import lacks_engines
from grpo_operator.layout.topology import Topology
from grpo_spec.lenient import clip
from grpo_spec.reasons import Reason
from grpo_spec.reports import Progress

S = TypeVar("S", MemberOutcome, Disruption)

MESSAGES_BYTES = 32768
"""Bytes that the messages of all members may take together: a status has to fit into etcd however many pods fail. The
whole text of the failure that ended an attempt is in `lastFailure`."""

PROGRESS_SECONDS = 10
"""Seconds between two status writes for progress: a write at every step of a fast job would burden the API server."""


def record(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    """Record members, progress, groups and placement: some of it can be seen only now."""
    runs = is_running_undisturbed(draft.job, draft.status)
    draft.update(members=_members(topology, draft.status, observed, runs=runs))
    _read_progress(draft, topology, observed, reports)
    observe_groups(draft, topology, observed)
    if runs:
        record_placement(draft, topology, observed)


def is_finished(status: GRPOJobStatus, topology: Topology) -> bool:
    """Whether every trainer pod is done. How engines end does not matter then."""
    return topology.trainer_pods <= {member.pod for member in status.members if is_done(member.outcome)}


def _members(topology: Topology, status: GRPOJobStatus, observed: Observed, *, runs: bool) -> tuple[MemberStatus, ...]:
    """Return the attempt's pods as first seen.

    A recorded outcome is never changed; pods of other attempts are left out.
    """
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
            if old is not None:
                outcome, disruption = _short(old.outcome, limit), _short(old.disruption, limit)
                members.append(edit(old, outcome=outcome, disruption=disruption))
    return tuple(members)


def _short(said: S | None, limit: int) -> S | None:
    """Return an outcome or a disruption with its message cut to so many bytes."""
    return said and edit(said, message=clip(said.message, limit))


def _seen(old: MemberStatus | None, pod: ObservedPod, role: str, *, runs: bool) -> MemberStatus:
    if old is None or (old.uid != pod.uid and old.replacing):
        return MemberStatus(
            pod=pod.name, role=role, uid=pod.uid, node=pod.node, outcome=pod.outcome, disruption=pod.disruption
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
    tried, known = EvaluationStatus.read(newest.evaluation), draft.status.evaluation
    if old is not None and (old.step, old.checkpoint_step, known) == (newest.step, newest.checkpoint_step, tried):
        return
    if old is not None and final is None and seconds_between(old.time, draft.now) < PROGRESS_SECONDS:
        return
    progress = ProgressStatus.read(newest, draft.now)
    if lacks_engines(topology, progress.metrics):  # the advice counts from those that sample
        progress = edit(progress, advice=None)
    draft.update(
        progress=progress,
        evaluation=tried,
        checkpoint=newest.checkpoint or draft.status.checkpoint,
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
    groups = tuple(
        GroupStatus(
            name=group.name,
            role=group.role,
            desired=group.spec.replicas,
            ready=len(ready & set(group.pods)),
            incarnation=incarnations.get(group.name, 0),
        )
        for group in topology.groups
    )
    draft.update(groups=groups, elastic=_elastic_status(draft, topology, observed))


def _elastic_status(draft: Draft, topology: Topology, observed: Observed) -> ElasticStatus | None:
    group = next((group for group in topology.groups if group.most is not None), None)
    if group is None:
        return None
    selector = f"{names.LABEL_JOB_UID}={draft.job.uid},{names.LABEL_GROUP}={group.name}"
    existing = sum(pod.group == group.name for pod in observed.pods.values())
    return ElasticStatus(replicas=existing, selector=selector)


def observe_pods(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    """Set the conditions that are about pods: `Scheduled`, `Running` and `Hung`.

    While an attempt runs they say what its pods do, and name what stands in the way. Otherwise its pods end or are
    gone: the conditions are False whatever the pods still do, except that a hang ends with the last pod.
    """
    if not (is_terminal(draft.status) or is_between_attempts(draft.status)):
        _observe_running(draft, topology, observed, reports)
    elif draft.status.attempt is not None or draft.job.spec.suspend:
        reason, message = _why_none_runs(draft.status)
        draft.set(Condition.SCHEDULED, False, reason, message)
        draft.set(Condition.RUNNING, False, reason, message)
        draft.update(placement=None)
        if not observed.pods:
            draft.clear(Condition.HUNG, reason, message)


def _why_none_runs(status: GRPOJobStatus) -> tuple[Reason, str]:
    if is_terminal(status):
        return Reason.FINISHED, "the job has ended"
    if rests(status):
        return Reason.SUSPENDED, "the job is suspended"
    if keeps_pods(status):
        return Reason.RESTARTING_IN_PLACE, "the next attempt begins in the same pods, which keep their nodes"
    return Reason.RESTARTING, "all pods are being recreated"


def _observe_running(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    pods = pods_of_attempt(draft, topology, observed)
    if (obstacle := find_obstacle(topology, pods)) is not None:
        draft.set(Condition.SCHEDULED, False, obstacle[0], obstacle[1] + describe_hold(draft, topology))
    else:
        draft.set(Condition.SCHEDULED, True, Reason.ALL_PODS_SCHEDULED, f"all {len(pods)} pods have a node")
    running, reason, message = _running(draft, topology, pods, observed, reports.get(topology.members[0].pod))
    draft.set(Condition.RUNNING, running, reason, message + _leaving(draft.status))
    if running:
        draft.clear(Condition.HUNG, Reason.STEPPING, "the ranks run again")
        if draft.status.running_time is None:
            draft.update(running_time=draft.now, placement_timeouts=None)


def _running(
    draft: Draft, topology: Topology, pods: list[ObservedPod], observed: Observed, progress: Progress | None
) -> tuple[bool, str, str]:
    expected, ready = len(topology.needed_pods), sum(pod.ready for pod in pods)
    if ready == expected:
        return True, Reason.ALL_RANKS_RUNNING, f"all {expected} pods are ready{_elastic(topology, observed)}"
    silent = [pod for pod in pods if not pod.ready and not pod.outcome and pod.node in observed.lost_nodes]
    if silent:
        return False, Reason.NODE_NOT_READY, _not_ready(silent, observed, draft)
    stuck = next(
        (pod for pod in pods if pod.waiting and not pod.waiting.startswith(("ContainerCreating", "PodInitializing"))),
        None,
    )
    if stuck is not None:
        return False, Reason.CONTAINER_WAITING, f"pod {stuck.name} on node {stuck.node}: {stuck.waiting}"
    if progress is not None and progress.waiting_for:
        return False, Reason.WAITING_FOR_PEERS, f"rank 0 waits for {'; '.join(progress.waiting_for[:8])}"
    engines = [pod.name for pod in pods if pod.name not in topology.trainer_pods and not pod.ready]
    if engines and ready + len(engines) == expected:
        waits = f"the ranks wait for {len(engines)} engines to load: {', '.join(engines[:8])}"
        return False, Reason.WAITING_FOR_ENGINES, waits
    fallen = [pod.name for pod in pods if not pod.ready] if draft.status.running_time else []
    more = f"; no longer ready: {', '.join(fallen[:8])}" if fallen else ""
    return False, Reason.STARTING, f"{ready} of {expected} pods are ready{more}"


def _elastic(topology: Topology, observed: Observed) -> str:
    """Say how many pods are ready of those that the job does not need, and what the first other one waits for."""
    wanted = topology.elastic_pods
    late = [name for name in wanted if name not in observed.pods or not observed.pods[name].ready]
    more = f", and {len(wanted) - len(late)} of {len(wanted)} elastic ones" if wanted else ""
    if not late:
        return more
    if (pod := observed.pods.get(late[0])) is None:
        return f"{more}; {late[0]} does not exist yet"
    if pod.unschedulable or pod.node is None:
        return f"{more}; {pod.name} has no node: {pod.unschedulable or 'it waits for the scheduler'}"
    return f"{more}; {pod.name} on node {pod.node}: {pod.waiting or 'its engine loads'}"


def _not_ready(silent: list[ObservedPod], observed: Observed, draft: Draft) -> str:
    """Say which node may be lost, which pods are on it and when the job gives them up."""
    node = silent[0].node or ""
    names = ", ".join(pod.name for pod in silent if pod.node == node)
    since, limit = observed.lost_nodes[node], draft.job.spec.failure_policy.node_lost_seconds
    if node in observed.absent_nodes:
        when = "the job restarts once the cluster has deleted them, in a minute or two"
        return f"node {node} no longer exists; its pods: {names}; {when}"
    until = f"unless it recovers, the job gives up its pods and restarts at {after(since, limit)}"
    return f"node {node} has not been ready since {since}; its pods: {names}; {until} (failurePolicy.nodeLostSeconds)"


def _leaving(status: GRPOJobStatus) -> str:
    """Say which pods the cluster takes away while their ranks may still save."""
    if not (members := leaving(status)):
        return ""
    others = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return f"; {describe_leaving(members[0], others)}; all pods are recreated once the ranks have ended"
