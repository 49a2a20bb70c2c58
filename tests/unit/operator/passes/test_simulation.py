"""Whole passes of two operators over a simulated cluster, while everything that can go wrong does.

Watches are late, cut off, expire, and lose or disorder events; requests fail before or after they took effect; passes
are suspended between any two requests; operators die; jobs are edited, suspended, deleted and created again; pods fail
and nodes are lost. `Truth` says what holds at every moment. Once the faults stop, every job reaches what a run without
faults reaches, costs no request any more, and is forgotten when it is deleted.
"""

from typing import Any

import aiohttp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from grpo_operator.api import names
from grpo_spec.reports import ExitCode
from support.control_plane.memory_api import failure
from support.control_plane.simulated_cluster import NODES
from support.control_plane.simulation import Simulation

JOBS = st.sampled_from(["a", "a", "a", "b"])
OPERATORS = st.integers(0, 1)
WHICH = st.integers(0, 7)
SERVER = {"topology": "Server", "server": {"groups": [{"name": "gen", "replicas": 1, "gpus": 1}]}}
POLICY = {"maxRestarts": 3, "backoffSeconds": 2, "maxBackoffSeconds": 4, "nodeLostSeconds": 30}
CODES = st.sampled_from([ExitCode.RANK_FAILED, ExitCode.PEER_LOST, ExitCode.STOPPED, ExitCode.DONE, 137])
FAULTS = st.sampled_from(
    [failure(409, "conflict"), failure(429, "busy"), failure(500, "etcd"), TimeoutError(), aiohttp.ClientError("reset")]
)
MINE = {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_JOB: "a"}


class Passes(RuleBasedStateMachine):
    @initialize(
        server=st.booleans(),
        engines=st.sampled_from(["RestartAll", "RestartGeneration"]),
        strategy=st.sampled_from(["Recreate", "InPlace"]),
    )
    def begin(self, server: bool, engines: str, strategy: str) -> None:
        policy = POLICY | {"restartStrategy": strategy}
        spec: dict[str, Any] = {"failurePolicy": policy}
        if server:
            spec = {"failurePolicy": policy | {"onGenerationFailure": engines}, "generation": SERVER}
        self.world = Simulation(**spec)
        self.world.create("a")
        self.world.go_on(3)

    @rule(name=JOBS, what=st.sampled_from(["create", "delete", "recreate", "suspend", "suspend", "reshape"]))
    def a_user_acts(self, name: str, what: str) -> None:
        if what in ("delete", "recreate"):
            self.world.delete(name)
        if what in ("create", "recreate"):
            self.world.create(name)
        if what == "suspend":
            self.world.suspend_or_resume(name)
        if what == "reshape":
            self.world.reshape(name)
        self.world.wait()

    @rule(kind=st.sampled_from(["Service", "ConfigMap", "StatefulSet"]), labels=st.sampled_from([{}, MINE]))
    def somebody_takes_a_name(self, kind: str, labels: dict[str, str]) -> None:
        self.world.take_name("a", kind, labels)

    @rule(which=WHICH, code=CODES)
    def a_pod_ends(self, which: int, code: int) -> None:
        pod = self.world.pod(which)
        if pod is not None and pod["status"].get("over") is False:
            self.world.truth.harm(pod)
            self.world.cluster.end_container(pod, code, "RankFailed")

    @rule(name=JOBS)
    def a_rank_fails_and_the_others_lose_it(self, name: str) -> None:
        self.world.fail(name)

    @rule(which=WHICH, how=st.sampled_from(["user", "drain", "kubelet"]))
    def a_pod_is_taken_away(self, which: int, how: str) -> None:
        if (pod := self.world.pod(which)) is not None:
            self.world.truth.harm(pod)
            if how == "kubelet":
                self.world.cluster.evict_by_kubelet(pod)
            elif how == "drain":
                self.world.cluster.delete_pod(
                    pod, type="DisruptionTarget", status="True", reason="EvictionByEvictionAPI"
                )
            else:
                self.world.cluster.delete_pod(pod)

    @rule(node=st.sampled_from(NODES), name=JOBS, done=st.booleans())
    def a_node_is_lost_or_returns_or_a_job_is_done(self, node: str, name: str, done: bool) -> None:
        if done:
            self.world.finish(name)
        else:
            self.world.lose_or_return(node)

    @rule(which=st.sampled_from(["run_statefulsets", "run_kubelets", "collect_garbage"]))
    def a_controller_works(self, which: str) -> None:
        getattr(self.world.cluster, which)()
        self.world.wait()

    @rule(which=OPERATORS)
    def an_operator_is_suspended(self, which: int) -> None:
        self.world.operators[which].api.held = True

    @rule(which=OPERATORS, request=WHICH, number=st.integers(1, 12), fault=st.none() | FAULTS)
    def requests_proceed(self, which: int, request: int, number: int, fault: Exception | None) -> None:
        for left in range(number, 0, -1):
            self.world.operators[which].api.proceed(request, fault if left == 1 else None)
            self.world.wait()

    @rule(which=OPERATORS)
    def an_operator_continues(self, which: int) -> None:
        self.world.operators[which].api.release()
        self.world.wait()

    @rule(which=OPERATORS, fault=FAULTS, number=st.integers(1, 2))
    def requests_fail(self, which: int, fault: Exception, number: int) -> None:
        self.world.operators[which].api.failures += [fault] * number

    @rule(which=OPERATORS)
    def an_operator_is_replaced(self, which: int) -> None:
        self.world.replace_operator(which)

    @rule(which=OPERATORS, kind=st.sampled_from(["Pod", "StatefulSet", "ConfigMap", names.KIND]))
    def a_watch_begins_to_lag(self, which: int, kind: str) -> None:
        self.world.operators[which].api.held_kinds.add(kind)

    @rule(
        which=OPERATORS, kind=st.sampled_from(["Pod", "StatefulSet", names.KIND]), number=st.none() | st.integers(1, 3)
    )
    def a_watch_catches_up(self, which: int, kind: str, number: int | None) -> None:
        if number is None:
            self.world.operators[which].api.held_kinds.discard(kind)
        for stream in self.world.watches(which, kind):
            stream.let_through(number)
        self.world.wait()

    @rule(which=OPERATORS, kind=st.sampled_from(["Pod", "StatefulSet", names.KIND]), how=st.sampled_from("eb2lx"))
    def a_watch_is_disturbed(self, which: int, kind: str, how: str) -> None:
        if how in "eb2":
            self.world.stop_watches(which, kind, {"e": "ends", "b": "breaks", "2": "expires"}[how])
        for stream in self.world.watches(which, kind) if kind != names.KIND else ():
            if how == "l":
                del stream.pending[:1]
            elif how == "x":
                stream.pending[:2] = stream.pending[1::-1]

    @rule(seconds=st.sampled_from([0.3, 1.0, 2.0, 5.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(seconds=st.integers(1, 8))
    def nothing_new_happens(self, seconds: int) -> None:
        self.world.go_on(seconds)

    @rule(seconds=st.integers(5, 15))
    def nothing_new_happens_for_longer(self, seconds: int) -> None:
        self.world.go_on(seconds, garbage=True)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


Passes.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestPasses = Passes.TestCase
