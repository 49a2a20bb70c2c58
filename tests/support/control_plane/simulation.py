"""Operators over a simulated cluster: what users do and what goes wrong, and how it must end once nothing does."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self

import aiohttp

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus, read_status
from grpo_operator.decide.conditions import holds, is_terminal, keeps_pods
from grpo_operator.decide.in_place import LATE_SECONDS
from grpo_operator.layout.topology import plan_topology
from grpo_spec.reports import ExitCode
from support.control_plane.jobs import job as parsed
from support.control_plane.jobs import spec
from support.control_plane.memory_api import END, Stream
from support.control_plane.memory_store import Object
from support.control_plane.plan_checks import PlanChecks
from support.control_plane.simulated_cluster import NAMESPACE, SimulatedCluster, attempt_in
from support.control_plane.simulated_operator import SimulatedOperator
from support.control_plane.simulated_truth import Truth
from support.control_plane.virtual_time import VirtualTimeLoop

JOBS = ("a", "b")
DRAINED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


class Simulation:
    """Two operators that follow the same jobs. `spec` is what jobs have besides the least."""

    def __init__(self, **spec: Any) -> None:
        self.spec = spec
        self.loop = VirtualTimeLoop()
        self.cluster = SimulatedCluster(self.loop.time)
        self.truth = Truth(self.cluster)
        self.plans = PlanChecks(self.truth.wrong)
        self.operators = [SimulatedOperator(self.cluster, self.truth.check) for _ in range(2)]
        for operator in self.operators:
            self._run(operator.start())

    @classmethod
    def running(cls, **spec: Any) -> Self:
        """Return operators whose job, called a, runs."""
        world = cls(**spec)
        world.create("a")
        world.go_on(5)
        assert world.status("a").phase == "Running"
        return world

    def wait(self, seconds: float = 0.01) -> None:
        """Let time pass, in which no controller works."""
        self._run(asyncio.sleep(seconds))

    def go_on(self, seconds: int, *, garbage: bool = False) -> None:
        """Let time pass in which all controllers work, or all but the garbage collector."""
        for _ in range(seconds):
            self.cluster.step()
            if garbage:
                self.cluster.collect_garbage()
            self.wait(1.0)

    def replace_operator(self, which: int) -> None:
        """End an operator wherever it is, and start another."""
        self._run(self.operators[which].stop())
        self.operators[which] = SimulatedOperator(self.cluster, self.truth.check)
        self._run(self.operators[which].start())

    # What users do

    def create(self, name: str) -> None:
        """Create a job, if there is none of this name."""
        if self.cluster.job(name) is None:
            metadata = {"name": name, "namespace": NAMESPACE}
            made = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata}
            self.cluster.store.put({**made, "spec": spec(**self.spec)})

    def delete(self, name: str) -> None:
        """Delete a job."""
        if self.cluster.job(name) is not None:
            self.cluster.store.remove(names.KIND, NAMESPACE, name)

    def suspend_or_resume(self, name: str) -> None:
        """Change spec.suspend."""
        if (raw := self.cluster.job(name)) is not None:
            self.cluster.store.edit(raw, spec=raw["spec"] | {"suspend": not raw["spec"].get("suspend", False)})

    def change(self, name: str, **fields: Any) -> None:
        """Change fields of a job's spec."""
        if (raw := self.cluster.job(name)) is not None:
            self.cluster.store.edit(raw, spec=raw["spec"] | fields)

    def reshape(self, name: str) -> None:
        """Remove a group from a suspended job, or add it again."""
        raw = self.cluster.job(name)
        if raw is not None and holds(self.status(name), Condition.SUSPENDED):
            groups = raw["spec"]["trainer"]["groups"]
            fewer = groups[:1] if len(groups) == 2 else spec()["trainer"]["groups"]
            self.cluster.store.edit(raw, spec=raw["spec"] | {"trainer": {"groups": fewer}})

    def take_name(self, name: str, kind: str, labels: dict[str, str]) -> None:
        """Create an object under the name of a child that there is not yet, or delete it again."""
        child = {
            "Service": name,
            "ConfigMap": names.contract_name(name, 1),
            "StatefulSet": f"{name}-b",
            "Pod": f"{name}-a-0",
        }[kind]
        place = kind, NAMESPACE, child
        if place in self.truth.foreign:
            del self.truth.foreign[place]
            self.cluster.store.remove(*place)
        elif self.cluster.store.get(*place) is None:
            content: dict[str, Any] = {"data": {}} if kind == "ConfigMap" else {"spec": {"selector": {}, "replicas": 0}}
            metadata = {"name": child, "namespace": NAMESPACE, "labels": labels}
            made = {"kind": kind, "metadata": metadata, "status": {"readyReplicas": 0}, **content}
            self.truth.foreign[place] = self.cluster.store.put(made)

    # What happens to pods and watches

    def pod(self, which: int) -> Object | None:
        """Return one of the pods."""
        pods = self.cluster.pods()
        return pods[which % len(pods)] if pods else None

    def finish(self, name: str) -> None:
        """End all trainer pods of a job that run, as done."""
        for pod in self.cluster.pods(job=name):
            if pod["status"].get("over") is False and pod["metadata"]["labels"][names.LABEL_ROLE] == "trainer":
                self.cluster.end_container(pod, ExitCode.DONE, "Done")

    def fail(self, name: str) -> None:
        """End a rank in one trainer pod of a job, and then those of the others, which lose it."""
        code = ExitCode.RANK_FAILED
        for pod in self.cluster.pods(job=name):
            if pod["status"].get("over") is False and pod["metadata"]["labels"][names.LABEL_ROLE] == "trainer":
                self.truth.harm(pod, says=True)
                self.cluster.end_container(pod, code, "RankFailed" if code == ExitCode.RANK_FAILED else "PeerLost")
                code = ExitCode.PEER_LOST

    def take_away(self, pod: Object, how: str) -> None:
        """Let a pod go as its user does ("user", "force"), a drain, or its kubelet."""
        if how == "force":
            self.cluster.store.remove("Pod", NAMESPACE, pod["metadata"]["name"])
        elif how in ("pressure", "own limit"):
            self.cluster.evict_by_kubelet(pod, own_fault=how == "own limit")
        elif how == "refused":
            self.cluster.refuse(pod)
        else:
            self.cluster.delete_pod(pod, **DRAINED if how == "drain" else {})

    def lose_or_return(self, node: str) -> None:
        """Cut a node off, if it is not the last one, or bring it back."""
        if node in self.cluster.lost:
            self.cluster.return_node(node)
        elif len(self.cluster.lost) < 2:
            for pod in self.cluster.pods():
                if pod["spec"].get("nodeName") == node:
                    self.truth.harm(pod)
            self.cluster.lose_node(node)

    def watches(self, which: int, kind: str) -> list[Stream]:
        """Return an operator's open watches of a kind."""
        return [one for one in self.operators[which].api.streams if one.selection.kind == kind]

    def stop_watches(self, which: int, kind: str, how: str) -> None:
        """End watches, break them, or let their version expire."""
        for stream in self.watches(which, kind):
            if how == "expires":
                self.cluster.store.compact()
            stream.stop(aiohttp.ClientPayloadError("cut off") if how == "breaks" else END)

    def status(self, name: str) -> GRPOJobStatus:
        """Return the status of a job."""
        raw = self.cluster.job(name)
        return read_status(raw.get("status") if raw else None)

    # The end

    def end(self) -> None:
        """Stop all faults, assert what must come of the jobs, and end everything."""
        try:
            self._end()
        finally:
            self.plans.stop()

    def _end(self) -> None:
        self._end_faults()
        self.go_on(120, garbage=True)
        if any(
            not is_terminal(self.status(name)) and any(m.outcome for m in self.status(name).members) for name in JOBS
        ):
            for name in JOBS:  # some pods are done: the others finish too
                self.finish(name)
            self.go_on(120, garbage=True)
        if any(keeps_pods(self.status(name)) for name in JOBS):  # for ranks that nobody ends
            self.go_on(LATE_SECONDS + 30, garbage=True)
        for name in JOBS:
            if (raw := self.cluster.job(name)) is not None:
                self._check_outcome(raw)
        self._check_quiet()
        self._check_nothing_is_kept_of_deleted_jobs()
        for operator in self.operators:
            self._run(operator.stop())
        self.loop.close()

    def _end_faults(self) -> None:
        self.plans.hangs, self.cluster.room = False, 99
        for place in [*self.truth.foreign]:
            del self.truth.foreign[place]
            self.cluster.store.remove(*place)
        for pod in self.cluster.environment_pods():
            self.cluster.disturb_environments(pod, sick=False)
        for node in [*self.cluster.lost]:
            self.cluster.return_node(node)
        self.cluster.store.compact()  # events may have been lost: all is listed again
        for operator in self.operators:
            operator.api.failures.clear()
            operator.api.release()
            operator.api.held_kinds.clear()
            for stream in operator.api.streams:
                stream.stop(END)

    def _check_outcome(self, raw: Object) -> None:
        status, pods = self.status(raw["metadata"]["name"]), self.cluster.pods(uid=raw["metadata"]["uid"])
        environments = self.cluster.environment_pods(uid=raw["metadata"]["uid"])
        if is_terminal(status) or raw["spec"].get("suspend"):
            assert is_terminal(status) or holds(status, Condition.SUSPENDED)
            assert not [*pods, *environments], "GPUs are given back"
            return
        assert status.phase == "Running"
        planned = plan_topology(parsed(**raw["spec"]))
        groups = planned.groups
        assert len(environments) == len(planned.environment_pods)
        assert len(pods) == sum(group.spec.replicas for group in groups)
        assert {pod["metadata"]["labels"][names.LABEL_ATTEMPT] for pod in pods} == {str(status.created_for)}
        assert {attempt_in(pod) for pod in pods} == {status.attempt}
        assert {member.uid for member in status.members} == {pod["metadata"]["uid"] for pod in pods}

    def _check_quiet(self) -> None:
        before = [operator.api.count() for operator in self.operators]
        self.go_on(60)
        assert [operator.api.count() for operator in self.operators] == before, "quiet jobs cost no request"
        states = [state for operator in self.operators for state in operator.program.jobs]
        assert not [pod for state in states for pod in state.deleted_pods], "all ends of pods are recorded"

    def _check_nothing_is_kept_of_deleted_jobs(self) -> None:
        for name in JOBS:
            self.delete(name)
        self.wait(5.0)
        for _ in range(3):
            self.go_on(5, garbage=True)
        for program in (operator.program for operator in self.operators):
            assert set(program.mirror.count().values()) == {0}
            jobs = program.jobs
            waiting = [job for queue in jobs.rates._queues.values() for job in queue.jobs]
            kept = (list(jobs), list(jobs._understood), waiting, list(program.instruments.jobs.keys))
            assert kept == ([], [], [], [])
            assert [jobs.intervals.seconds(runs=runs) for runs in (True, False)] == [0.0, 0.0]
            assert not program.queue.keys

    def _run(self, what: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(what)
        assert not self.truth.wrong, self.truth.wrong[0]
