"""Whole passes of two operators over a simulated cluster, while everything that can go wrong does.

Watches are late, cut off, expire, and lose or disorder events; requests fail before or after they took effect; passes
are suspended between any two requests; operators die; jobs are edited, suspended, deleted and created again; pods fail,
ranks hang, nodes are lost, or others take them. `Truth` says what holds at every moment, and `PlanChecks` what holds of
every plan. Once the faults stop, every job reaches what a run without faults reaches, costs no request any more, and is
forgotten when it is deleted.
"""

from typing import Any

import aiohttp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from grpo_operator.api import names
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode
from support.control_plane.memory_api import failure
from support.control_plane.memory_store import disturb
from support.control_plane.simulated_cluster import NODES
from support.control_plane.simulation import Simulation

JOBS = st.sampled_from(["a", "a", "a", "b"])
KINDS = st.sampled_from(["Pod", "StatefulSet", names.KIND])
OPERATORS = st.integers(0, 1)
WHICH = st.integers(0, 7)
POLICY = {"backoffSeconds": 2, "maxBackoffSeconds": 4, "nodeLostSeconds": 30, "hangSeconds": 100}
POLICIES = st.fixed_dictionaries(
    {
        "onTrainerFailure": st.sampled_from(["RestartAll", "RestartAll", "RestartAll", "Fail"]),
        "maxRestarts": st.sampled_from([3, 4, 1, 0]),
        "restartStrategy": st.sampled_from(["Recreate", "InPlace"]),
    }
)
CODES = st.sampled_from([ExitCode.RANK_FAILED, ExitCode.PEER_LOST, ExitCode.STOPPED, ExitCode.DONE, 137, -1, *ExitCode])
SECONDS = st.integers(0, 5)
FAULTS = st.sampled_from(
    [failure(409, "conflict"), failure(429, "busy"), failure(500, "etcd"), TimeoutError(), aiohttp.ClientError("reset")]
)
ENVIRONMENTS = {
    "environments": [{"name": "wordle", "factory": "m:Wordle"}],
    "environmentPods": {"groups": [{"name": "boxes", "replicas": 2}]},
}
MINE = {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_JOB: "a"}


def server(engines: int | None) -> dict[str, Any]:
    """Return a generation section with one group of engines, elastic if their number is given."""
    elastic = {"elastic": {"replicas": engines, "maxReplicas": 3}} if engines else {}
    groups = [{"name": "gen", "replicas": 1, "gpus": 1}]
    return {"topology": "Server", "server": {"groups": groups} | elastic}


class Passes(RuleBasedStateMachine):
    @initialize(
        chosen=POLICIES,
        generation=st.sampled_from(["", "fixed", "elastic"]),
        engines=st.sampled_from(["RestartAll", "RestartGeneration", "Fail"]),
        room=st.sampled_from([99, 99, 99, 0]),
        more=st.builds(
            dict.__or__, st.sampled_from([{}, {}, {"ttlSecondsAfterFinished": 5}]), st.sampled_from([{}, ENVIRONMENTS])
        ),
    )
    def begin(self, chosen: dict[str, Any], generation: str, engines: str, room: int, more: dict[str, Any]) -> None:
        policy = POLICY | chosen
        spec: dict[str, Any] = {"failurePolicy": policy, "scheduling": {"timeoutSeconds": 30}, **more}
        self.is_elastic = generation == "elastic"
        if generation:
            policy["onGenerationFailure"] = "RestartGeneration" if self.is_elastic else engines
            spec["generation"] = server(2 if self.is_elastic else None)
        self.world = Simulation(**spec)
        self.world.truth.possible |= {Reason.HUNG, Reason.PLACEMENT_TIMEOUT}
        self.world.plans.start()
        self.world.cluster.room = room
        self.world.create("a")
        self.world.go_on(3)

    @rule(
        name=JOBS,
        what=st.sampled_from(["create", "delete", "recreate", "suspend", "suspend", "reshape", "deadline", "scale"]),
        engines=st.integers(1, 3),
    )
    def a_user_acts(self, name: str, what: str, engines: int) -> None:
        if what in ("delete", "recreate"):
            self.world.delete(name)
        if what in ("create", "recreate"):
            self.world.create(name)
        if what == "suspend":
            self.world.suspend_or_resume(name)
        if what == "reshape":
            self.world.reshape(name)
        if what == "deadline":
            self.world.change(name, activeDeadlineSeconds=100)
        if what == "scale" and self.is_elastic:
            self.world.change(name, generation=server(engines))
        self.world.wait()

    @rule(room=st.sampled_from([1, 2, 0, 99]), seconds=st.sampled_from([0, 2, 5, 40]))
    def others_take_or_leave_nodes(self, room: int, seconds: int) -> None:
        self.world.cluster.room = room
        self.world.go_on(seconds)

    @rule(seconds=SECONDS)
    def ranks_hang_or_go_on(self, seconds: int) -> None:
        self.world.plans.hangs = not self.world.plans.hangs
        self.world.go_on(seconds)

    @rule(kind=st.sampled_from(["Service", "ConfigMap", "StatefulSet", "Pod"]), labels=st.sampled_from([{}, MINE]))
    def somebody_takes_a_name(self, kind: str, labels: dict[str, str]) -> None:
        self.world.take_name("a", kind, labels)

    @rule(which=WHICH, code=CODES, seconds=SECONDS)
    def a_pod_ends(self, which: int, code: int, seconds: int) -> None:
        pod = self.world.pod(which)
        if pod is not None and pod["status"].get("over") is False:
            self.world.truth.harm(pod, says=code in {*ExitCode})
            reason = "PeerLost" if code == ExitCode.PEER_LOST else "RankFailed"
            self.world.cluster.end_container(pod, code, reason)
        self.world.go_on(seconds)

    @rule(which=WHICH, how=st.sampled_from(["restart", "sick", "user", "drain", "pressure", "force"]), seconds=SECONDS)
    def an_environment_pod_fails(self, which: int, how: str, seconds: int) -> None:
        """No attempt ends for it: it is no harm."""
        cluster = self.world.cluster
        if pods := cluster.environment_pods():
            pod = pods[which % len(pods)]
            if how in ("restart", "sick"):
                cluster.disturb_environments(pod, sick=how == "sick")
            else:
                self.world.take_away(pod, how)
        self.world.go_on(seconds)

    @rule(name=JOBS)
    def a_rank_fails_and_the_others_lose_it(self, name: str) -> None:
        self.world.fail(name)

    @rule(number=st.sampled_from([1, 5, 12]), seconds=SECONDS)
    def ranks_take_steps(self, number: int, seconds: int) -> None:
        self.world.plans.steps += number
        self.world.go_on(seconds)

    @rule(which=WHICH, how=st.sampled_from(["user", "force", "drain", "pressure", "own limit", "refused"]))
    def a_pod_is_taken_away(self, which: int, how: str) -> None:
        if (pod := self.world.pod(which)) is not None:
            self.world.truth.harm(pod)
            self.world.take_away(pod, how)

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

    @rule(which=OPERATORS, kind=KINDS, number=st.none() | st.integers(1, 3))
    def a_watch_catches_up(self, which: int, kind: str, number: int | None) -> None:
        if number is None:
            self.world.operators[which].api.held_kinds.discard(kind)
        for stream in self.world.watches(which, kind):
            stream.let_through(number)
        self.world.wait()

    @rule(which=OPERATORS, kind=KINDS, how=st.sampled_from(["ends", "breaks", "expires", "lose", "exchange"]))
    def a_watch_is_disturbed(self, which: int, kind: str, how: str) -> None:
        if how in ("ends", "breaks", "expires"):
            self.world.stop_watches(which, kind, how)
        elif kind != names.KIND:
            for stream in self.world.watches(which, kind):
                if stream.pending:
                    disturb(stream.pending, 0, how)

    @rule(seconds=st.sampled_from([0.3, 1.0, 2.0, 5.0, 40.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(seconds=st.integers(1, 15), garbage=st.booleans())
    def nothing_new_happens(self, seconds: int, garbage: bool) -> None:
        self.world.go_on(seconds, garbage=garbage)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


Passes.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestPasses = Passes.TestCase
