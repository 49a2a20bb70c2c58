"""The time of the next pass over a job, if nothing changes until then. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after, seconds_between
from grpo_operator.decide import lifecycle, placement
from grpo_operator.decide.blame import Reports
from grpo_operator.decide.conditions import find, holds, is_terminal, rests
from grpo_operator.decide.observe import Observed
from grpo_operator.layout.job import Job
from grpo_spec.reasons import Reason

POLL_SECONDS = 2.0
"""Seconds to the next pass while something is expected to happen."""

CALM_SECONDS = 10.0
"""Seconds to the next pass while all pods are ready, none is being deleted and steps are reported: a change of a pod
wakes the job anyway, and progress is not written more often than this."""

RETRY_SECONDS, LAST_RETRY_SECONDS = 10.0, 60.0
"""Seconds to the next pass over a job that the cluster has an obstacle for: a missing claim, a name that is taken. The
longer it stays refused, the rarer its passes."""


def seconds_to_next(
    job: Job,
    status: GRPOJobStatus,
    observed: Observed,
    reports: Reports,
    now: datetime,
    refused: str | None,
    least: float,
) -> float | None:
    """Return the seconds until the next pass is due, or None if only a change calls for it.

    `status` is the one that the pass decided on, `refused` the reason why an attempt cannot begin. `least`: seconds to
    a pass that only looks around at least, where there are many jobs; deadlines are kept nevertheless.
    """
    if is_terminal(status):
        return POLL_SECONDS
    deadline = job.spec.active_deadline_seconds
    left = None if deadline is None else max(0.2, deadline - lifecycle.active_seconds(status, now))
    if refused is not None:
        # Only a change of the spec mends it, or of its site; but the clock of a job that has run goes on.
        most = None if refused == Reason.INVALID_SPEC and not job.site else max(_retry_seconds(status, now), least)
        return most if left is None or status.active_since is None else min(most or left, left)
    if rests(status):
        return None if holds(status, Condition.SUSPENDED) else CALM_SECONDS
    if status.next_restart_time is not None:
        return min(
            POLL_SECONDS if observed.pods else CALM_SECONDS, max(0.2, seconds_between(now, status.next_restart_time))
        )
    if status.attempt is None:
        if job.queue is not None and job.admission is None and not observed.foreign:
            return None  # Kueue's answer calls for the next pass
        if (tries := status.download) is None:
            return 1.0
        limit = after(tries.since, job.spec.cache.prefetch_deadline_seconds)
        left_to = [seconds_between(now, at) for at in (tries.retry_time, limit) if at is not None]
        most = max(CALM_SECONDS if observed.downloaders else POLL_SECONDS, least)
        return min([most, *(one for one in left_to if one > 0)])
    progress, running = status.progress, status.running_time
    has_stepped = progress is not None and running is not None and progress.time >= running
    is_ending = any(not one.replacing and (one.outcome or one.disruption) for one in status.members)
    if is_ending:
        most = POLL_SECONDS
    elif holds(status, Condition.RUNNING):
        most = max(CALM_SECONDS if has_stepped or not reports else POLL_SECONDS, least)
    else:
        most = max(POLL_SECONDS, least)
    return min(most, seconds_to_deadline(job, status, observed, now))


def is_quiet(status: GRPOJobStatus, observed: Observed) -> bool:
    """Whether only a change or a deadline changes the course of an attempt of which no launcher has an answer."""
    if is_terminal(status) or rests(status) or status.attempt is None or status.next_restart_time is not None:
        return False
    if observed.lost_nodes or observed.absent_nodes or observed.ready_nodes or holds(status, Condition.BLOCKED):
        return False
    pods = (*observed.pods.values(), *observed.environment_pods.values())
    if any(pod.deletion_time is not None for pod in pods):
        return False
    return not any(one.replacing or one.outcome or one.disruption for one in status.members)


def seconds_to_deadline(job: Job, status: GRPOJobStatus, observed: Observed, now: datetime) -> float:
    """Return the seconds until time alone changes the course of an attempt, infinity if it never does."""
    deadline = job.spec.active_deadline_seconds
    left = [] if deadline is None else [max(0.2, deadline - lifecycle.active_seconds(status, now))]
    ahead = [] if holds(status, Condition.RUNNING) else [*_deadlines(job, status, observed)]
    ahead += [one.replace_time for one in status.members if one.replacing and one.replace_time]
    times = (seconds_between(now, at) for at in ahead)
    return min([*left, *(seconds for seconds in times if seconds > 0)], default=math.inf)


def _deadlines(job: Job, status: GRPOJobStatus, observed: Observed) -> Iterator[datetime]:
    """Yield the times at which something happens to an attempt that does not run, unless its pods change before."""
    if (since := lifecycle.starting_since(status)) is not None:
        yield after(since, job.spec.startup_deadline_seconds)
    if status.placement is not None:
        yield placement.ends(job, status, status.placement)
    for lost in observed.lost_nodes.values():
        yield after(lost, job.spec.failure_policy.node_lost_seconds)


def _retry_seconds(status: GRPOJobStatus, now: datetime) -> float:
    refused = find(status, Condition.ACCEPTED)
    waited = 0.0 if refused is None else seconds_between(refused.last_transition_time, now)
    return min(max(RETRY_SECONDS, waited / 10), LAST_RETRY_SECONDS)
