"""A job that is planned pass after pass, for tests of the operator's decisions."""

from dataclasses import replace
from typing import Any

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after
from grpo_operator.decide.conditions import find
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.decide.plan import Obstacle, Plan, plan
from grpo_spec.reports import ExitCode, Progress
from support.control_plane.jobs import NOW, ended, observed, pod, world
from support.control_plane.plan_checks import check_it_is_true, check_transition

A, B = (member.pod for member in world()[1].members)
"""Names of the two trainer pods of the default job."""

SERVER = {"generation": {"topology": "Server", "server": {"groups": [{"name": "gen", "replicas": 2, "gpus": 1}]}}}
"""Spec of the topology Server with two engine pods, job-gen-0 and job-gen-1."""


class Case:
    """A job and the status that the passes so far gave it. Times (`at`) are seconds since the job began.

    Of each plan it is asserted what must hold of all (`plan_checks`).
    """

    def __init__(self, **spec: Any) -> None:
        self.job, self.topology = world(**spec)
        self.status = GRPOJobStatus()
        self.last: Plan = self.see()

    def see(
        self,
        *pods: ObservedPod,
        at: int = 0,
        progress: Progress | None = None,
        obstacle: Obstacle | None = None,
        **more: Any,
    ) -> Plan:
        """Plan one pass that sees these pods and, if given, this progress of rank 0; keep the new status."""
        reports = {} if progress is None else {self.topology.members[0].pod: progress}
        seen, now = observed(*pods, **more), after(NOW, at)
        self.last = plan(self.job, self.topology, self.status, seen, reports, now, obstacle)
        if not self.last.delete_job:
            check_it_is_true(self.job, self.topology, self.last.status, seen)
        check_transition(self.job, self.topology, self.status, self.last.status, seen, now)
        self.status = self.last.status
        return self.last

    def see_all_ready(self, at: int = 0) -> list[ObservedPod]:
        """Plan one pass that sees all pods of the attempt ready; return the pods."""
        pods = [
            pod(name, uid=f"{name}-{self.status.attempt}", ready=True, attempt=self.status.attempt or 0)
            for name in self.topology.pods
        ]
        self.see(*pods, at=at)
        return pods

    def message(self, kind: Condition) -> str:
        """Return the message of a condition that was set."""
        condition = find(self.status, kind)
        assert condition is not None
        return condition.message

    def edit(self, **spec: Any) -> None:
        """Replace the spec."""
        self.job, self.topology = world(**spec)


def all_ready(kind: type[Case] = Case, /, **spec: Any) -> tuple[Any, list[ObservedPod]]:
    """Return a job, of this class, whose pods are all ready, and the pods."""
    case = kind(**spec)
    return case, case.see_all_ready()


def trainers(case: Case) -> list[ObservedPod]:
    """Return the trainer pods of a job's first attempt, which are ready."""
    return [pod(name, uid=f"{name}-0", ready=True) for name in sorted(case.topology.trainer_pods)]


def engine(number: int, **more: Any) -> ObservedPod:
    """Return the pod of an engine of the group gen."""
    return replace(pod(f"job-gen-{number}", uid=f"job-gen-{number}-0"), group="gen", **more)


def dead(number: int, at: int, **more: Any) -> ObservedPod:
    """Return the pod of an engine of the group gen that has died."""
    one = failed(f"job-gen-{number}", reason="EngineDied", at=at)
    return replace(one, group="gen", **more)


def failed(
    name: str, code: int = ExitCode.RANK_FAILED, reason: str = "RankFailed", at: int = 0, attempt: int = 0
) -> ObservedPod:
    """Return a pod that ended with this exit code and reason."""
    return pod(name, uid=f"{name}-{attempt}", outcome=ended(code, reason, after(NOW, at)), attempt=attempt)
