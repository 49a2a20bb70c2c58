"""Begin of an attempt: its time, and the changes that it makes. Pure.

`is_about_to_begin` is the only place that decides it. The reconciler asks it first, checks live that nothing is in the
way (the claims exist, a dry run of every child succeeds) and refuses the job otherwise. `plan` then asks it again, with
the same arguments, and calls `begin`.
"""

from __future__ import annotations

from datetime import datetime

from grpo_operator.api.defaults import together, used_defaults
from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import seconds_between
from grpo_operator.decide import downloading, in_place
from grpo_operator.decide.conditions import Draft, holds, is_terminal, keeps_pods, rests
from grpo_operator.decide.observe import Observed
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_spec.reasons import Reason
from grpo_spec.words import counted


def is_about_to_begin(job: Job, status: GRPOJobStatus, observed: Observed, now: datetime) -> bool:
    """Whether the next attempt begins in this pass.

    `plan` still ends the job instead if it is finished or a deadline has passed.
    """
    is_free = job.queue is None or job.admission is not None
    return is_free and is_due(job, status, observed, now) and downloading.is_done(job, status, observed)


def is_due(job: Job, status: GRPOJobStatus, observed: Observed, now: datetime) -> bool:
    """Whether the next attempt begins once Kueue admits it, where the job is in a queue, and all is downloaded.

    The job may run, all pods of the last attempt are gone or wait for the next one, all objects of an earlier job are
    gone, and the wait after a failure is over.
    """
    if is_terminal(status) or job.spec.suspend or not is_between_attempts(status):
        return False
    is_due = status.next_restart_time is None or seconds_between(status.next_restart_time, now) >= 0
    is_free = in_place.is_ready(job, status, observed) if keeps_pods(status) else not observed.pods
    return is_free and not observed.foreign and is_due


def begin(draft: Draft, topology: Topology) -> None:
    """Accept the spec and begin the next attempt. Its children are applied once this status is written."""
    accept(draft, topology)
    status, attempt = draft.status, next_attempt(draft.status)
    draft.update(
        attempt=attempt,
        pods_attempt=status.created_for if keeps_pods(status) else None,
        attempt_start_time=draft.now,
        running_time=None,
        next_restart_time=None,
        members=(),
        start_time=status.start_time or draft.now,
        active_since=status.active_since or draft.now,
        avoid_nodes=tuple(node for node in status.avoid_nodes if seconds_between(draft.now, node.until) > 0),
        admission=draft.job.admission,
        defaults=together(status.defaults, used_defaults(draft.job.spec)),
        site=dict(draft.job.site) or None,
        pod_requests=draft.job.requests,
    )
    for kind, reason in (
        (Condition.RESTARTING, Reason.RESTARTED),
        (Condition.SUSPENDED, Reason.RESUMED),
        (Condition.HUNG, Reason.RESTARTED),
    ):
        draft.clear(kind, reason, f"attempt {attempt} has begun")


def accept(draft: Draft, topology: Topology) -> None:
    """Say that nothing is in the way of an attempt."""
    shape = ", ".join(f"{group.name} {group.spec.replicas} x {group.gpus}" for group in topology.groups)
    message = f"{counted(topology.world_size, 'rank')} on {counted(len(topology.members), 'pod')} ({shape})"
    if draft.job.ignored:
        message += f"; this operator does not know, and ignores, {', '.join(draft.job.ignored)}"
    draft.set(Condition.ACCEPTED, True, Reason.VALID, message)


def wait_for_first(draft: Draft, topology: Topology, reason: Reason, why: str) -> None:
    """Accept the spec, and say what the first attempt waits for."""
    accept(draft, topology)
    draft.update(
        site=dict(draft.job.site) or None, pod_requests=draft.job.requests
    )  # what a queue admits stays what it is
    draft.set(Condition.SCHEDULED, False, reason, why)
    draft.clear(Condition.SUSPENDED, Reason.RESUMED, why)


def next_attempt(status: GRPOJobStatus) -> int:
    """Return the number of the attempt after the current one; the first is 0."""
    return 0 if status.attempt is None else status.attempt + 1


def is_between_attempts(status: GRPOJobStatus) -> bool:
    """Whether no attempt runs: none has begun yet, or the last one has ended (`Restarting` holds, or the job rests)."""
    return status.attempt is None or holds(status, Condition.RESTARTING) or rests(status)


def is_running_undisturbed(job: Job, status: GRPOJobStatus) -> bool:
    """Whether an attempt runs and the operator deletes none of its pods: a deleted pod was deleted by somebody else."""
    return not (is_terminal(status) or is_between_attempts(status) or job.spec.suspend)
