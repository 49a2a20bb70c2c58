"""The conditions that say what an attempt's pods do: `Scheduled`, `Running` and `Hung`. Pure."""

from __future__ import annotations

from math import log2

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after, rfc3339
from grpo_operator.decide import environment_pods
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.blame import Reports, hang_seconds, idle_seconds
from grpo_operator.decide.conditions import Draft, is_terminal, keeps_pods, rests
from grpo_operator.decide.failure_policy import was_refused
from grpo_operator.decide.lifecycle import IN_MEMBERS, describe_leaving, first_line, leaving
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.placement import describe_hold, pods_of_attempt, why_unplaced
from grpo_operator.layout.topology import Topology
from grpo_spec.reasons import Reason
from grpo_spec.reports import Progress
from grpo_spec.words import counted, every

_CREATING = "ContainerCreating"
"""A kubelet's word for a container until it has begun. If the pod is prepared, only its image is missing."""

STILL_SECONDS = 60
"""Seconds without any progress, and longer than a step, after which `Running` says so."""


def observe_pods(draft: Draft, topology: Topology, observed: Observed, reports: Reports) -> None:
    """Set the conditions that are about pods: `Scheduled`, `Running` and `Hung`.

    While an attempt runs they say what its pods do, and name what stands in the way. Otherwise its pods end or are
    gone: the conditions are False whatever the pods still do, except that a hang ends with the attempt's last pod.
    """
    if not (is_terminal(draft.status) or is_between_attempts(draft.status)):
        _observe_running(draft, topology, observed, reports)
    elif draft.status.attempt is not None or draft.job.spec.suspend:
        reason, message = _why_none_runs(draft.status)
        draft.set(Condition.SCHEDULED, False, reason, message)
        draft.set(Condition.RUNNING, False, reason, message)
        draft.update(placement=None)
        if not pods_of_attempt(draft, topology, observed):
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
    if (waits := environment_pods.find_wait(draft.status, topology, observed)) is not None:
        draft.set(Condition.SCHEDULED, False, *waits)
    elif (obstacle := why_unplaced(topology, pods, observed.why_absent)) is not None:
        draft.set(Condition.SCHEDULED, False, obstacle[0], obstacle[1] + describe_hold(draft, topology))
    else:
        draft.set(
            Condition.SCHEDULED, True, Reason.ALL_PODS_SCHEDULED, f"{every(len(pods), 'pod has', 'pods have')} a node"
        )
    running, reason, message = _running(draft, topology, pods, observed, reports.get(topology.members[0].pod))
    draft.set(Condition.RUNNING, running, reason, message + _leaving(draft.status, topology))
    if running:
        draft.clear(Condition.HUNG, Reason.STEPPING, "the ranks run again")
        if draft.status.running_time is None:
            draft.update(running_time=draft.now, placement_timeouts=None)


def _running(
    draft: Draft, topology: Topology, pods: list[ObservedPod], observed: Observed, progress: Progress | None
) -> tuple[bool, str, str]:
    expected, ready = len(topology.needed_pods), sum(pod.ready for pod in pods)
    if ready == expected:
        return (
            True,
            Reason.ALL_RANKS_RUNNING,
            f"{every(expected, 'pod is', 'pods are')} ready{_elastic(draft.status, topology, observed)}"
            f"{environment_pods.describe(topology, observed)}{_still(progress, draft)}",
        )
    silent = [pod for pod in pods if not pod.ready and not pod.outcome and pod.node in observed.lost_nodes]
    if silent:
        return False, Reason.NODE_NOT_READY, _not_ready(silent, observed, draft)
    refused = next((pod for pod in pods if was_refused(pod.outcome)), None)
    if refused is not None and refused.outcome is not None:
        why = f"its kubelet refuses it, and its StatefulSet creates another one: {refused.outcome.message}"
        return False, Reason.CONTAINER_WAITING, f"pod {refused.name} on node {refused.node}: {why}"
    stuck = next(
        (pod for pod in pods if pod.waiting and not pod.waiting.startswith((_CREATING, "PodInitializing"))),
        None,
    )
    if stuck is not None:
        return False, Reason.CONTAINER_WAITING, f"pod {stuck.name} on node {stuck.node}: {stuck.waiting}"
    if progress is not None and progress.waiting_for:
        return False, Reason.WAITING_FOR_PEERS, f"rank 0 waits for {'; '.join(progress.waiting_for[:8])}"
    engines = [pod.name for pod in pods if pod.name not in topology.trainer_pods and not pod.ready]
    if engines and ready + len(engines) == expected:
        number = sum(not set(engines).isdisjoint(one.pods) for one in topology.engines)
        waits = f"the ranks wait for {counted(number, 'engine')} to load: {', '.join(engines[:8])}"
        return False, Reason.WAITING_FOR_ENGINES, waits
    fallen = [pod.name for pod in pods if not pod.ready] if draft.status.running_time else []
    more = f"; no longer ready: {', '.join(fallen[:8])}" if fallen else ""
    if pulling := next((pod for pod in pods if pod.prepared and (pod.waiting or "").startswith(_CREATING)), None):
        more = f"; pod {pulling.name} on node {pulling.node} pulls its image"
    return False, Reason.STARTING, f"{ready} of {counted(expected, 'pod is', 'pods are')} ready{more}"


def _still(said: Progress | None, draft: Draft) -> str:
    """Say in which phase the ranks of rank 0's pod have been for long without progress, such as a reward that hangs.

    The time is given in powers of two: a text that changes each minute would be written each minute.
    """
    if said is None or (idle := idle_seconds(said)) < max(STILL_SECONDS, said.step_seconds or 0.0):
        return ""
    phases: dict[str, list[int]] = {}
    for rank, phase in said.rank_phases.items():
        phases.setdefault(phase.partition(" for ")[0], []).append(int(rank))
    where = "; ".join(
        f"rank {min(ranks)}{f' and {len(ranks) - 1} more' if ranks[1:] else ''}: {phase}"
        for phase, ranks in sorted(phases.items(), key=lambda one: min(one[1]))
    )
    minutes = 2 ** int(log2(idle / 60))
    limit = f"it is a hang after {hang_seconds(said, draft.job.spec.failure_policy):.0f} s (failurePolicy.hangSeconds)"
    nothing = "no rank has taken a step, sampled a token, scored an answer or changed its phase"
    return f"; for {minutes} min or more {nothing} ({where or said.phase}); {limit}"


def _elastic(status: GRPOJobStatus, topology: Topology, observed: Observed) -> str:
    """Describe the elastic pods: how many are ready, and what blocks the first that is not."""
    wanted = topology.elastic_pods
    late = [name for name in wanted if name not in observed.pods or not observed.pods[name].ready]
    more = f", and {len(wanted) - len(late)} of {len(wanted)} elastic ones" if wanted else ""
    if not late:
        return more
    there = {pod.uid for pod in observed.pods.values()}
    failed = {one.pod: one for one in status.members if one.replacing and one.uid in there}
    if (name := next((name for name in late if name in failed), None)) is not None:
        why = failed[name].outcome
        said = f"{why.reason}: {first_line(why.message, IN_MEMBERS)}" if why else "it has failed"
        at = failed[name].replace_time
        when = f"at {rfc3339(at)}" if at else "at once"
        return f"{more}; {name} on node {failed[name].node}: {said}; it is replaced {when}"
    if (pod := observed.pods.get(late[0])) is None:
        return f"{more}; {observed.why_absent[1] if observed.why_absent else f'{late[0]} does not exist yet'}"
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
    until = f"unless it recovers, the job gives up its pods and restarts at {rfc3339(after(since, limit))}"
    silence = f"node {node} has not been ready since {rfc3339(since)}"
    return f"{silence}; its pods: {names}; {until} (failurePolicy.nodeLostSeconds)"


def _leaving(status: GRPOJobStatus, topology: Topology) -> str:
    """Say which pods the cluster takes away while their ranks may still save."""
    if not (members := [one for one in leaving(status) if one.pod in topology.needed_pods]):
        return ""
    others = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return f"; {describe_leaving(members[0], others)}; all pods are recreated once the ranks have ended"
