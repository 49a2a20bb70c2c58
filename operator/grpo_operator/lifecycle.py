"""What moves a job from one attempt to the next and to its end: acceptance, failures, restarts, suspension, deadlines. Pure.

Between two attempts, `Restarting` or `Suspended` holds: everything is at 0, and the next attempt begins only when no pod of the job is left
(JobSet's recreation of all jobs, with the intent written before anything is deleted).
"""

from __future__ import annotations

from datetime import datetime, timedelta

from grpo_operator.failurepolicy import Decision, backoff_seconds, decide
from grpo_operator.jobstatus import AvoidedNode, Failure, GRPOJobStatus, MemberStatus, Restarts
from grpo_operator.names import Condition, Reason, Role
from grpo_operator.observe import Observed
from grpo_operator.status import Draft, find, holds, is_terminal
from grpo_operator.topology import Job, Topology
from grpo_operator.verdict import seconds_between

NOT_COUNTED = "a restart that failurePolicy.maxRestarts does not count"

AVOID_SECONDS = 1800
"""How long attempts that begin keep away from a node that was lost."""


def accept(draft: Draft, topology: Topology) -> None:
    """The spec is valid and nothing is in its way: the first attempt may begin."""
    shape = ", ".join(f"{group.name} {group.spec.replicas} x {group.spec.gpus}" for group in topology.groups)
    message = f"{topology.world_size} ranks on {len(topology.members)} pods ({shape})"
    draft.set(Condition.ACCEPTED, True, Reason.VALID, message)
    draft.update(start_time=draft.status.start_time or draft.now)


def next_epoch(status: GRPOJobStatus) -> int:
    """Number of the attempt after this one."""
    return 0 if status.epoch is None else status.epoch + 1


def begin_epoch(draft: Draft) -> None:
    """The next attempt, from a clean slate: no pod of an earlier one is left."""
    epoch = next_epoch(draft.status)
    draft.update(
        epoch=epoch,
        epoch_start_time=draft.now,
        running_time=None,
        next_restart_time=None,
        members=(),
        active_since=draft.status.active_since or draft.now,
        avoid_nodes=tuple(node for node in draft.status.avoid_nodes if seconds_between(draft.now, node.until) > 0),
    )
    draft.clear(Condition.RESTARTING, Reason.RESTARTED, f"attempt {epoch} has begun")
    draft.clear(Condition.SUSPENDED, Reason.RESUMED, f"attempt {epoch} has begun")
    draft.clear(Condition.HUNG, Reason.RESTARTED, f"attempt {epoch} has begun")


def is_between_epochs(status: GRPOJobStatus) -> bool:
    """Whether no attempt runs: one has ended, or none has begun, and the next has not."""
    return status.epoch is None or holds(status, Condition.RESTARTING) or holds(status, Condition.SUSPENDED)


def is_left_alone(job: Job, status: GRPOJobStatus) -> bool:
    """Whether an attempt runs of which the operator itself takes no pod away: what is deleted then, somebody else has deleted."""
    return not (is_terminal(status) or is_between_epochs(status) or job.spec.suspend)


def leaving(status: GRPOJobStatus) -> list[MemberStatus]:
    """The pods that the cluster takes away, or has taken; engines that the operator makes anew are none of them."""
    return [member for member in status.members if member.disruption is not None and not member.replacing]


def describe_leaving(member: MemberStatus, others: str = "") -> str:
    """One of `leaving`, for people; `others` stand beside it."""
    assert member.disruption is not None
    return f"pod {member.pod} on node {member.node}{others} is being taken away: {member.disruption.message}"


def may_begin(status: GRPOJobStatus, observed: Observed, now: str) -> bool:
    """Whether the next attempt may begin: no pod of an earlier one is left, and the wait is over."""
    is_due = status.next_restart_time is None or seconds_between(status.next_restart_time, now) >= 0
    return not observed.pods and not observed.foreign and is_due


def suspend(draft: Draft, observed: Observed) -> None:
    """Stop the clock; the reason tells whether pods are still saving."""
    left = sorted(observed.pods)
    if left:
        message = f"spec.suspend is set; {len(left)} pods save and end: {', '.join(left[:8])}"
    else:
        message = "spec.suspend is set; no pod is left" + _from_where(draft)
    if not holds(draft.status, Condition.SUSPENDED):
        draft.update(active_seconds=active_seconds(draft.status, draft.now), active_since=None, next_restart_time=None)
        draft.clear(Condition.RESTARTING, Reason.SUSPENDED, "the job is suspended")
    draft.set(Condition.SUSPENDED, True, Reason.SUSPENDING if left else Reason.SUSPENDED, message)
    draft.set(Condition.RUNNING, False, Reason.SUSPENDED, "the job is suspended")


def act(draft: Draft, failure: Failure) -> Decision:
    """Carry out what `failurePolicy` says of a failure: the end, an attempt to come, or an engine to be made anew."""
    policy, restarts = draft.job.spec.failure_policy, draft.status.restarts
    decision = decide(policy, failure, restarts)
    draft.update(last_failure=failure.model_copy(update={"counted": decision.counted}))
    if failure.reason == Reason.HUNG:
        draft.set(Condition.HUNG, True, Reason.HUNG, failure.message)
    if decision.action == "Fail":
        end(draft, failure, decision.why)
        return decision
    draft.update(restarts=Restarts(total=restarts.total + 1, counted=restarts.counted + decision.counted))
    if decision.action == "RestartGeneration":
        _replace_engine(draft, failure)
        return decision
    wait = backoff_seconds(policy, restarts.counted if decision.counted else 0, draft.job.uid, restarts.total)
    at = after(draft.now, wait)
    count = f"restart {restarts.counted + 1} of {policy.max_restarts}" if decision.counted else NOT_COUNTED
    draft.update(next_restart_time=at)
    where = _avoid(draft, failure)
    told = f"{describe(failure)}; {count}, not before {at}{where}{_from_where(draft)}"
    draft.set(Condition.RESTARTING, True, Reason.RESTARTING, told)
    draft.set(Condition.RUNNING, False, Reason.RESTARTING, "all pods are made anew")
    return decision


def reconsider(draft: Draft, failure: Failure | None) -> None:
    """While an attempt ends, the cluster may tell that the peer it lost was on a lost node: the cause is corrected, and counted once."""
    last = draft.status.last_failure
    if failure is None or failure.reason != Reason.NODE_LOST or last is None or last.reason not in ("PeerLost", "PeersMissing"):
        return
    decision = decide(draft.job.spec.failure_policy, failure, Restarts())
    draft.update(last_failure=failure.model_copy(update={"counted": decision.counted}))
    if last.counted and not decision.counted:
        restarts = draft.status.restarts
        draft.update(restarts=restarts.model_copy(update={"counted": restarts.counted - 1}))
    where = _avoid(draft, failure)
    count = "a restart that is counted" if decision.counted else NOT_COUNTED
    told = f"{describe(failure)}; {count}, not before {draft.status.next_restart_time}{where}{_from_where(draft)}"
    draft.set(Condition.RESTARTING, True, Reason.RESTARTING, told)


def _replace_engine(draft: Draft, failure: Failure) -> None:
    members = tuple(one.model_copy(update={"replacing": True}) if one.pod == failure.pod else one for one in draft.status.members)
    groups = tuple(
        group.model_copy(update={"incarnation": group.incarnation + 1})
        if group.role == Role.GENERATION and failure.pod is not None and failure.pod.startswith(f"{draft.job.name}-{group.name}-")
        else group
        for group in draft.status.groups
    )
    draft.update(members=members, groups=groups)


def _avoid(draft: Draft, failure: Failure) -> str:
    """Keep away from a node that was lost; says so."""
    if failure.reason != Reason.NODE_LOST or failure.node is None:
        return ""
    others = [node for node in draft.status.avoid_nodes if node.name != failure.node]
    lost = AvoidedNode(name=failure.node, until=after(draft.now, AVOID_SECONDS))
    draft.update(avoid_nodes=tuple([*others, lost][-64:]))
    return f", away from {failure.node} if there is another node"


def end(draft: Draft, failure: Failure | None, why: str = "") -> None:
    """Set the terminal condition, once."""
    if failure is None:
        trainers = sum(member.role == Role.TRAINER for member in draft.status.members)
        steps = f" after {draft.status.progress.step} steps" if draft.status.progress else ""
        where = f"; checkpoint {draft.status.checkpoint}" if draft.status.checkpoint else ""
        draft.set(Condition.COMPLETE, True, Reason.TRAINING_DONE, f"all {trainers} trainer pods finished{steps}{where}")
    else:
        draft.set(Condition.FAILED, True, failure.reason, describe(failure) + (f"; {why}" if why else ""))
        draft.update(last_failure=failure)
    ended = "the job has ended"
    draft.set(Condition.RUNNING, False, Reason.FINISHED, ended)
    for kind in (Condition.RESTARTING, Condition.SUSPENDED, Condition.HUNG):
        draft.clear(kind, Reason.FINISHED, ended)
    active = active_seconds(draft.status, draft.now)
    draft.update(completion_time=draft.now, next_restart_time=None, active_since=None, active_seconds=active)


def describe(failure: Failure) -> str:
    """A failure in one line."""
    first, _, more = failure.message.partition("\n")
    hint = " (more in status.lastFailure)" if more else ""
    if failure.pod is None:
        return first + hint
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None and failure.exit_code >= 0 else ""
    return f"{failure.role} pod {failure.pod} on node {failure.node}{code}: {first}{hint}"


def overdue(draft: Draft) -> Failure | None:
    """The deadline that is over, as a failure nobody's pod is to blame for."""
    spec, status = draft.job.spec, draft.status
    active = active_seconds(status, draft.now)
    if spec.active_deadline_seconds is not None and active >= spec.active_deadline_seconds:
        message = f"the job was active for {active} s; spec.activeDeadlineSeconds is {spec.active_deadline_seconds}"
        return Failure(reason=Reason.DEADLINE_EXCEEDED, message=message, time=draft.now, epoch=status.epoch or 0)
    if is_between_epochs(status) or status.running_time is not None or status.epoch_start_time is None:
        return None
    waited = seconds_between(status.epoch_start_time, draft.now)
    if waited < spec.startup_deadline_seconds:
        return None
    obstacle = next((c for kind in (Condition.SCHEDULED, Condition.RUNNING) if (c := find(status, kind)) and c.status != "True"), None)
    why = f"; {obstacle.reason}: {obstacle.message}" if obstacle else ""
    message = f"attempt {status.epoch} was not running after {waited:.0f} s (spec.startupDeadlineSeconds){why}"
    return Failure(reason=Reason.STARTUP_DEADLINE_EXCEEDED, message=message[:4096], time=draft.now, epoch=status.epoch or 0)


def active_seconds(status: GRPOJobStatus, now: str) -> int:
    """Seconds the job has been active, without suspensions."""
    running = 0.0 if status.active_since is None else max(0.0, seconds_between(status.active_since, now))
    return status.active_seconds + round(running)


def after(moment: str, seconds: float) -> str:
    """A timestamp so many seconds later."""
    return (datetime.fromisoformat(moment) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _from_where(draft: Draft) -> str:
    if draft.status.epoch is None:
        return ""
    if draft.job.spec.storage.claim_name is None:
        return "; it begins at step 0, since spec.storage.claimName is not set"
    return f"; it goes on from {draft.status.checkpoint}" if draft.status.checkpoint else ""
