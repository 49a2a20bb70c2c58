"""Plan for a pass that raised: say so on the job, and do what does not depend on what failed. Pure.

A fault of the operator, or input that nobody thought of, must not leave a job that cannot be suspended and never
reaches its deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from grpo_operator.api.names import Condition, Role
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide import lifecycle
from grpo_operator.decide.conditions import Draft, find, is_terminal, rests
from grpo_operator.decide.events import events_between
from grpo_operator.decide.observe import Left
from grpo_operator.decide.plan import Mode, Obstacle, Plan
from grpo_operator.layout.job import Job
from grpo_spec.reasons import Reason


def rescue(job: Job, status: GRPOJobStatus, pods: Mapping[str, str], failed: Obstacle, now: datetime) -> Plan:
    """Set `Blocked`; end the job if a deadline has passed, suspend it if its spec says so. `pods`: the role of each
    pod that exists, by its name.

    The queue repeats the pass.
    """
    draft = Draft(status, job, now)
    old = find(status, Condition.BLOCKED)
    # A text that differs only in details, such as a time, is not written again: the write would wake the job.
    if old is None or (old.status, old.reason, _subject(old.message)) != (
        "True",
        failed.reason,
        _subject(failed.message),
    ):
        draft.set(Condition.BLOCKED, True, failed.reason, failed.message)
    if not is_terminal(status):
        if failure := lifecycle.passed_deadline(draft):
            lifecycle.end(draft, failure)
        elif job.spec.suspend and status.attempt is not None:
            lifecycle.suspend(draft, dict.fromkeys(sorted(pods), Left()))
    new = draft.finish()
    mode = Mode.KEEP
    if status.attempt is not None and (is_terminal(new) or rests(new)):
        saves = not is_terminal(new) and Role.TRAINER in pods.values()
        mode = Mode.ENGINES_ONLY if saves else Mode.STOPPED
    return Plan(status=new, mode=mode, events=events_between(status, new, job))


def recovered(job: Job, status: GRPOJobStatus, now: datetime) -> GRPOJobStatus:
    """Return the status after a pass that succeeded."""
    draft = Draft(status, job, now)
    draft.clear(Condition.BLOCKED, Reason.RECOVERED, "the last pass over the job succeeded")
    return draft.finish()


def _subject(message: str) -> str:
    return message.partition(": ")[0]
