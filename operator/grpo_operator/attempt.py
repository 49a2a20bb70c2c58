"""One look at an attempt: what is recorded of its pods, its progress, and what `Scheduled` and `Running` say. Pure."""

from __future__ import annotations

from grpo_operator.jobstatus import Disruption, GroupStatus, GRPOJobStatus, MemberStatus, ProgressStatus
from grpo_operator.lifecycle import after, describe_leaving, is_left_alone, leaving
from grpo_operator.names import Condition, Reason
from grpo_operator.observe import Observed, ObservedPod
from grpo_operator.status import Draft
from grpo_operator.topology import Topology
from grpo_operator.verdict import EFFECTS, Reports, is_done, seconds_between
from grpo_workload.contract import Progress

PROGRESS_SECONDS = 10
"""Status is written for progress at most this often: at every step of a fast job, the API server would pay for it."""


def record(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    """Take down what can be seen now and not later."""
    runs = is_left_alone(draft.job, draft.status)
    draft.update(members=_members(topology, draft.status, observed, runs=runs))
    _read_progress(draft, topology, observed, reports)
    _observe_groups(draft, topology, observed)


def is_finished(status: GRPOJobStatus, topology: Topology) -> bool:
    """Whether every trainer pod is done; engines have served their turn then, however they end."""
    return topology.trainer_pods <= {member.pod for member in status.members if is_done(member.outcome)}


def _members(topology: Topology, status: GRPOJobStatus, observed: Observed, *, runs: bool) -> tuple[MemberStatus, ...]:
    """Pods as first seen; an outcome once recorded stays. A pod of another attempt is none of them."""
    known = {member.pod: member for member in status.members}
    members = []
    for group in topology.groups:
        for name in group.pods:
            pod, old = observed.pods.get(name), known.get(name)
            if pod is not None and pod.epoch == status.epoch:
                old = _seen(old, pod, group.role, runs=runs)
            if old is not None and old.uid in observed.gone:
                old = _seen(old, observed.gone[old.uid], group.role, runs=runs)
            if old is not None:
                members.append(old)
    return tuple(members)


def _seen(old: MemberStatus | None, pod: ObservedPod, role: str, *, runs: bool) -> MemberStatus:
    if old is None or (old.uid != pod.uid and old.replacing):
        return MemberStatus(pod=pod.name, role=role, uid=pod.uid, node=pod.node, outcome=pod.outcome, disruption=pod.disruption)
    if old.uid != pod.uid:
        return old
    disruption, outcome = old.disruption or pod.disruption, old.outcome or pod.outcome
    failed = outcome is not None and outcome.exit_code not in EFFECTS  # whoever deletes it then cleans up
    if disruption is None and pod.deletion_time is not None and runs and not old.replacing and not failed:
        disruption = Disruption(reason=Reason.POD_REPLACED, message="somebody deleted it")
    return old.model_copy(update={"node": old.node or pod.node, "outcome": outcome, "disruption": disruption})


def _read_progress(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    name = topology.members[0].pod
    master = observed.pods.get(name)
    final = master.final_progress if master and master.epoch == draft.status.epoch else None
    newest, old = final or reports.get(name), draft.status.progress
    if newest is None or newest.total_steps == 0:
        return
    if old is not None and (old.step, old.checkpoint_step) == (newest.step, newest.checkpoint_step):
        return
    if old is not None and final is None and seconds_between(old.time, draft.now) < PROGRESS_SECONDS:
        return
    draft.update(progress=ProgressStatus.read(newest, draft.now), checkpoint=newest.checkpoint or draft.status.checkpoint)


def _observe_groups(draft: Draft, topology: Topology, observed: Observed) -> None:
    incarnations = {group.name: group.incarnation for group in draft.status.groups}
    groups = tuple(
        GroupStatus(
            name=group.name,
            role=group.role,
            desired=group.spec.replicas,
            ready=sum(pod.ready for pod in observed.pods.values() if pod.name in group.pods),
            incarnation=incarnations.get(group.name, 0),
        )
        for group in topology.groups
    )
    draft.update(groups=groups)


def observe_pods(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    """Set `Scheduled` and `Running`, each with the obstacle that a person has to know of."""
    expected = topology.pods
    pods = [observed.pods[name] for name in expected if name in observed.pods]
    unschedulable = next((pod for pod in pods if pod.unschedulable), None)
    waiting = [pod.name for pod in pods if pod.node is None]
    if len(pods) < len(expected):
        missing = next(name for name in expected if name not in observed.pods)
        hint = f"kubectl describe statefulset {missing.rpartition('-')[0]} says why"
        why = f"{len(pods)} of {len(expected)} pods exist; {missing} is missing ({hint})"
        draft.set(Condition.SCHEDULED, False, Reason.WAITING_FOR_PODS, why)
    elif unschedulable is not None:
        draft.set(Condition.SCHEDULED, False, Reason.UNSCHEDULABLE, f"pod {unschedulable.name}: {unschedulable.unschedulable}")
    elif waiting:
        draft.set(Condition.SCHEDULED, False, Reason.WAITING_FOR_PODS, f"{len(waiting)} pods wait for the scheduler, first {waiting[0]}")
    else:
        draft.set(Condition.SCHEDULED, True, Reason.ALL_PODS_SCHEDULED, f"all {len(pods)} pods have a node")
    running, reason, message = _running(draft, topology, pods, observed, reports.get(topology.members[0].pod))
    draft.set(Condition.RUNNING, running, reason, message + _leaving(draft.status))
    if running:
        draft.clear(Condition.HUNG, Reason.STEPPING, "ranks make steps")
        if draft.status.running_time is None:
            draft.update(running_time=draft.now)


def _running(
    draft: Draft, topology: Topology, pods: list[ObservedPod], observed: Observed, progress: Progress | None
) -> tuple[bool, str, str]:
    expected, ready = len(topology.pods), sum(pod.ready for pod in pods)
    if ready == expected:
        return True, Reason.ALL_RANKS_RUNNING, f"all {expected} pods are ready"
    silent = [pod for pod in pods if not pod.ready and not pod.outcome and pod.node in observed.lost_nodes]
    if silent:
        return False, Reason.NODE_NOT_READY, _not_ready(silent, observed, draft)
    stuck = next((pod for pod in pods if pod.waiting and not pod.waiting.startswith(("ContainerCreating", "PodInitializing"))), None)
    if stuck is not None:
        return False, Reason.CONTAINER_WAITING, f"pod {stuck.name} on node {stuck.node}: {stuck.waiting}"
    if progress is not None and progress.waiting_for:
        return False, Reason.WAITING_FOR_PEERS, f"rank 0 waits for {'; '.join(progress.waiting_for[:8])}"
    engines = [pod.name for pod in pods if pod.name not in topology.trainer_pods and not pod.ready]
    if engines and ready + len(engines) == expected:
        return False, Reason.WAITING_FOR_ENGINES, f"the ranks wait for {len(engines)} engines to load: {', '.join(engines[:8])}"
    fallen = [pod.name for pod in pods if not pod.ready] if draft.status.running_time else []
    more = f"; ready no longer: {', '.join(fallen[:8])}" if fallen else ""
    return False, Reason.STARTING, f"{ready} of {expected} pods are ready{more}"


def _not_ready(silent: list[ObservedPod], observed: Observed, draft: Draft) -> str:
    """What a node that may be lost means for the job, and until when it may come back."""
    node = silent[0].node or ""
    names = ", ".join(pod.name for pod in silent if pod.node == node)
    since, limit = observed.lost_nodes[node], draft.job.spec.failure_policy.node_lost_seconds
    if node in observed.absent_nodes:
        return f"node {node} of {names} is no longer there; the job restarts when the cluster has deleted them, in a minute or two"
    given_up = f"its pods are given up, and the job restarts, at {after(since, limit)} (failurePolicy.nodeLostSeconds)"
    return f"node {node} of {names} has not been ready since {since}; unless it comes back, {given_up}"


def _leaving(status: GRPOJobStatus) -> str:
    """Which pods the cluster takes away while their ranks may still save."""
    if not (members := leaving(status)):
        return ""
    others = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return f"; {describe_leaving(members[0], others)}; when the ranks have ended, all pods are made anew"
