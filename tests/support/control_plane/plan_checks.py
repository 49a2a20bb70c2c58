"""Checks of every plan, of simulations and unit tests, by what its pass saw.

The status is true, settles, and changes as it may.
"""

import traceback
from typing import Any
from unittest import mock

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import seconds_between
from grpo_operator.decide.attempts import is_about_to_begin, is_between_attempts
from grpo_operator.decide.conditions import holds, is_terminal, keeps_pods
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.plan import Plan, plan
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_operator.passes import reconcile
from grpo_spec.reasons import Reason
from grpo_spec.reports import Progress

_HANGS = Progress(step=3, total_steps=9, age_seconds=1e6, rank_phases={"0": "Training"})


class PlanChecks:
    """Stands between passes and `plan` from `start` to `stop`, and notes in `wrong` what should not have been planned.

    `hangs`: whether the launcher of rank 0 reports that no rank makes progress; otherwise it has taken `steps`.
    """

    def __init__(self, wrong: list[str]) -> None:
        self.wrong, self.hangs, self.steps = wrong, False, 0
        self._patch = mock.patch.object(reconcile, "plan", self._plan)

    def start(self) -> None:
        """Judge each plan from now on."""
        self._patch.start()

    def stop(self) -> None:
        """Judge no plan any more."""
        self._patch.stop()

    def _plan(self, job: Job, topology: Topology, old: GRPOJobStatus, observed: Observed, *rest: Any) -> Plan:
        reports, now, *rest = rest
        master = observed.pods.get(topology.members[0].pod)
        if master is not None and master.ready and master.outcome is None and not is_terminal(old):
            said = _HANGS if self.hangs else Progress(step=self.steps, total_steps=1_000_000)
            reports = {master.name: said}

        def plan_from(status: GRPOJobStatus) -> Plan:
            return plan(job, topology, status, observed, reports, now, *rest)

        decided = plan_from(old)
        try:
            if not decided.delete_job:
                check_it_is_true(job, topology, decided.status, observed)
            check_transition(job, topology, old, decided.status, observed, now)
            check_budget(job, topology, old, decided.status, observed, now)
            seen = [old, decided.status]
            while seen[-1] != seen[-2]:
                assert len(seen) < 8, "passes over the same facts do not settle"
                seen.append(plan_from(seen[-1]).status)
        except AssertionError:  # a pass would take it for a failure of its own
            self.wrong.append(traceback.format_exc())
        return decided


def check_it_is_true(job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed) -> None:
    """Assert that a status says what the pass that makes it has seen."""
    generations = {status.observed_generation, *(condition.observed_generation for condition in status.conditions)}
    assert generations == {job.generation}
    seen = [observed.pods.get(name) for name in topology.needed_pods]
    own = [pod for pod in seen if pod is not None and pod.attempt == status.created_for]
    ready = sum(pod.ready for pod in observed.pods.values() if pod.attempt == status.created_for)
    assert not holds(status, Condition.SCHEDULED) or [pod.node is not None for pod in own] == [True] * len(seen)
    assert not holds(status, Condition.RUNNING) or [pod.ready for pod in own] == [True] * len(seen)
    assert not holds(status, Condition.HUNG) or own
    ready += sum(pod.ready for pod in observed.environment_pods.values())
    assert status.attempt is None or sum(group.ready for group in status.groups) <= ready
    assert (status.elastic is None) == (not topology.elastic_groups or status.attempt is None)
    if is_terminal(status) or is_between_attempts(status):
        assert not holds(status, Condition.SCHEDULED)
        assert not holds(status, Condition.RUNNING)
    left = {*observed.pods, *observed.environment_pods}
    rests = status.phase == "Suspended" and not left and job.spec.suspend
    assert not (holds(status, Condition.SUSPENDED) and left)
    assert holds(status, Condition.STALLED) == (status.phase == "Failed")
    is_settled = status.phase in ("Running", "Succeeded") or rests
    is_changing = status.phase != "Failed" and (holds(status, Condition.BLOCKED) or not is_settled)
    assert holds(status, Condition.RECONCILING) == is_changing
    assert 0 <= status.restarts.counted <= min(status.restarts.total, job.spec.failure_policy.max_restarts)
    assert not (holds(status, Condition.COMPLETE) and holds(status, Condition.FAILED))
    if is_terminal(status):
        assert status.completion_time is not None
        assert status.next_restart_time is None


def check_transition(
    job: Job, topology: Topology, old: GRPOJobStatus, new: GRPOJobStatus, observed: Observed, now: str
) -> None:
    """Assert that attempts begin when they may, in no pods or in those that wait, and that failures are counted once.

    `Truth` asserts the rest, of the statuses that are written.
    """
    if new.attempt != old.attempt:
        assert is_about_to_begin(job, old, observed, now), "the reconciler foresaw it"
        assert old.next_restart_time is None or seconds_between(old.next_restart_time, now) >= 0, "the back-off is over"
        if keeps_pods(old):
            assert [pod.uid for pod in observed.pods.values()] == [member.uid for member in old.members], "the same"
            assert all(pod.outcome for name, pod in observed.pods.items() if name in topology.trainer_pods)
        else:
            assert not observed.pods, "an attempt begins only when no pod is left"
        assert new.members == ()
    assert 0 <= new.restarts.total - old.restarts.total <= 1
    if new.restarts.total > old.restarts.total:
        assert new.last_failure is not None
        assert not is_between_attempts(old), "the failure of an attempt is counted once"
        placed = [name in observed.pods and observed.pods[name].node is not None for name in topology.needed_pods]
        in_part = any(placed) and not all(placed)
        assert in_part or new.last_failure.reason != Reason.PLACEMENT_TIMEOUT, "pods hold nodes, and others have none"


def check_budget(
    job: Job, topology: Topology, old: GRPOJobStatus, new: GRPOJobStatus, observed: Observed, now: str
) -> None:
    """Assert that only pods that the job needs end it or spend restarts, that each restart waits at least twice as long
    as the one before, and that restarts are forgotten only after new steps.
    """
    policy, failure = job.spec.failure_policy, new.last_failure
    if failure is not None and failure != old.last_failure and failure.pod is not None:
        assert failure.pod in topology.needed_pods, "a pod that the job does not need has not failed the job"
    before = old.recent_restarts.total if old.recent_restarts else 0
    counts, since = new.restarts.total > old.restarts.total, [one.recent_restarts for one in (old, new)]
    is_anew = counts and since[0] and since[1] and since[1].step > since[0].step  # forgotten, and the first one since
    forgotten = is_anew or (new.recent_restarts.total if new.recent_restarts else 0) < before
    if forgotten or new.restarts.counted < old.restarts.counted - 1:
        assert old.recent_restarts is not None
        assert new.progress is not None
        assert new.progress.step >= old.recent_restarts.step + policy.recovery_steps, "restarts are forgotten too early"
    if new.restarts.total == old.restarts.total:
        return
    earlier = 0 if forgotten else before
    least = int(0.8 * min(policy.max_backoff_seconds, policy.backoff_seconds * 2.0**earlier))
    there = {pod.uid for pod in observed.pods.values()}
    waiting = {member.uid for member in old.members if member.replacing}
    replaced = [one for one in new.members if one.replacing and not one.failures and one.uid in there - waiting]
    together = {one.replace_time for one in old.members if one.replacing}  # with engines that failed before
    replaced = [one for one in replaced if one.replace_time not in together]
    dues = [due for due in (new.next_restart_time, *(one.replace_time for one in replaced)) if due]
    assert all(seconds_between(now, due) >= least for due in dues), f"a restart waits {least} s at least"
