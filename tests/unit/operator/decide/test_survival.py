"""A job survives random histories: failures, edits, nodes that others take, jumps of the clock, stale reads, lost
writes, two operators.

Asserted: an end is permanent, attempts begin one after another, when no pod exists or all wait for the next one,
restarts stay within their budget, a failure counts once, pods that live belong to one attempt, the job always ends or
waits for its user, and every status is true: of the newest generation, with no condition about pods that do not exist.

`World` models the parts of Kubernetes that matter: a status with compare-and-swap, StatefulSets that create and delete
pods, kubelets that may be dead. An operator's pass is split into its reads, its write and its effects, so that two
operators interleave in any order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grpo_operator.api.names import Condition
from grpo_operator.api.status import Disruption, GRPOJobStatus
from grpo_operator.decide.attempts import is_about_to_begin, is_between_attempts
from grpo_operator.decide.conditions import holds, is_terminal, keeps_pods
from grpo_operator.decide.lifecycle import after
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.decide.plan import Mode, Plan, plan
from grpo_operator.layout.topology import Job, Topology, plan_topology
from grpo_spec.reports import ExitCode, Progress
from support.control_plane.jobs import NOW, ended, job
from support.control_plane.jobs import pod as make_pod

GRACE = 300
ENGINES = {"groups": [{"name": "gen", "replicas": 1, "gpus": 1}]}
NODES = ("one", "two")


@dataclass
class StatefulSet:
    replicas: int
    attempt: int


@dataclass
class World:
    """The cluster. `now` is in seconds since it began."""

    job: Job
    topology: Topology
    status: GRPOJobStatus = field(default_factory=GRPOJobStatus)
    version: int = 0
    now: int = 0
    sets: dict[str, StatefulSet] = field(default_factory=dict)
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    room: int = 9  # most pods that find a node at the same time
    deleted: bool = False
    uids: Any = field(default_factory=lambda: itertools.count(1))
    history: list[GRPOJobStatus] = field(default_factory=list)

    @property
    def time(self) -> str:
        return after(NOW, self.now)

    def observe(self) -> Observed:
        lost = {node: after(NOW, since) for node, since in self.lost.items()}
        return Observed(pods={name: pod.without(self.status.over) for name, pod in self.pods.items()}, lost_nodes=lost)

    def runs(self, pod: ObservedPod) -> bool:
        """Whether the pod's part of the attempt that it knows of has not ended, on a node that works."""
        is_over = any(one.attempt in (None, attempt_in(pod)) for one in pod.endings)
        return not is_over and pod.node not in {None, *self.lost}

    def end(self, pod: ObservedPod, code: int, reason: str) -> None:
        """End what runs in the pod. The kubelet restarts the container, and shows how the last one ended."""
        says_so = code in list(ExitCode)  # else the launcher was killed
        ending = Ending(ended(code, reason, self.time), attempt_in(pod) if says_so else None)
        self.pods[pod.name] = replace(pod, endings=(ending,), ready=False, restarts=1)

    def controllers(self) -> None:
        """Run the StatefulSet controller, the scheduler and the kubelets that are alive once."""
        for group in self.topology.groups:
            wanted = self.sets.get(group.statefulset, StatefulSet(0, 0))
            for ordinal, name in enumerate(group.possible_pods):
                pod = self.pods.get(name)
                if pod is None and ordinal < wanted.replicas:
                    number = next(self.uids)
                    made = make_pod(name, uid=str(number), attempt=wanted.attempt)
                    self.pods[name] = replace(made, node=None, unschedulable="no room")
                elif pod is not None and ordinal >= wanted.replicas:
                    self.delete(name)
        for name, pod in list(self.pods.items()):
            if pod.deletion_time is not None and pod.node not in self.lost:
                del self.pods[name]
            elif pod.node is None and sum(one.node is not None for one in self.pods.values()) < self.room:
                self.pods[name] = replace(pod, node=NODES[int(pod.uid) % 2], unschedulable=None)

    def delete(self, name: str, *, force: bool = False) -> None:
        if force:
            del self.pods[name]
        elif self.pods[name].deletion_time is None:
            self.pods[name] = replace(self.pods[name], deletion_time=after(self.time, GRACE), ready=False)


def attempt_in(pod: ObservedPod) -> int:
    """Return the attempt whose contract is in the pod's file."""
    return pod.attempt if pod.told is None else pod.told


@dataclass
class Operator:
    """One operator, in the middle of a pass or between two passes."""

    read: tuple[int, GRPOJobStatus, Observed, dict[str, Progress]] | None = None
    decided: Plan | None = None


PASSES = st.integers(0, 5)


class Survival(RuleBasedStateMachine):
    @initialize(
        server=st.sampled_from(["", "fixed", "elastic"]),
        on_generation=st.sampled_from(["RestartAll", "RestartGeneration", "Fail"]),
        on_trainer=st.sampled_from(["RestartAll", "RestartAll", "RestartAll", "Fail"]),
        maximum=st.sampled_from([2, 1, 4, 0]),
        strategy=st.sampled_from(["Recreate", "InPlace"]),
        ttl=st.none() | st.just(1000),
    )
    def begin(
        self, server: str, on_generation: str, on_trainer: str, maximum: int, strategy: str, ttl: int | None
    ) -> None:
        if not server and on_generation == "RestartGeneration":
            on_generation = "RestartAll"
        if server == "elastic":
            on_generation = "RestartGeneration"
        policy = {
            "onGenerationFailure": on_generation,
            "onTrainerFailure": on_trainer,
            "maxRestarts": maximum,
            "restartStrategy": strategy,
            "hangSeconds": 100,
        }
        self.spec: dict[str, Any] = {"failurePolicy": policy, "scheduling": {"timeoutSeconds": 30}}
        self.engines = 1 if server == "elastic" else None
        self.spec |= self.generation() if server else {}
        if ttl is not None:
            self.spec["ttlSecondsAfterFinished"] = ttl
        made = job(**self.spec)
        self.world = World(made, plan_topology(made))
        self.operators = [Operator(), Operator()]
        self.hung = False

    def generation(self) -> dict[str, Any]:
        elastic = {"elastic": {"replicas": self.engines, "maxReplicas": 3}} if self.engines else {}
        return {"generation": {"topology": "Server", "server": ENGINES | elastic}}

    @rule(passes=PASSES)
    def whole_passes(self, passes: int) -> None:
        """Run whole passes of one operator without interference, while the cluster does its work."""
        self.undisturbed(passes, seconds=8)

    # The parts of an operator's pass.

    @rule(number=st.integers(0, 1))
    def read(self, number: int) -> None:
        world = self.world
        reports = {}
        master = world.topology.members[0].pod
        if world.pods.get(master) and self.hung:
            reports[master] = Progress(step=3, total_steps=9, age_seconds=101, rank_phases={"0": "Training"})
        self.operators[number] = Operator(read=(world.version, world.status, world.observe(), reports))

    @rule(number=st.integers(0, 1), lose=st.booleans())
    def decide_and_write(self, number: int, lose: bool) -> None:
        operator, world = self.operators[number], self.world
        if operator.read is None or world.deleted:
            return
        version, status, observed, reports = operator.read
        operator.read = None
        decided = plan(world.job, world.topology, status, observed, reports, world.time)
        self.check_it_settles(decided.status, observed, reports)
        if not decided.delete_job:
            self.check_it_is_true(decided.status, observed)
        if decided.status != status:
            if lose or version != world.version:
                return  # the API server failed, or the other operator was faster: nothing may have been touched
            self.check_transition(status, decided.status, observed)
            world.status, world.version = decided.status, world.version + 1
            world.history.append(decided.status)
        operator.decided = decided

    @rule(number=st.integers(0, 1), cut=st.booleans())
    def carry_out(self, number: int, cut: bool) -> None:
        operator, world = self.operators[number], self.world
        decided, operator.decided = operator.decided, None
        if decided is None or world.deleted:
            return
        for one in decided.deletions:
            if one.name in world.pods and world.pods[one.name].uid == one.uid:
                world.delete(one.name, force=one.force)
        if decided.delete_job:
            world.deleted = True
        if decided.mode == Mode.KEEP or cut:  # the operator was killed here
            return
        assert decided.status.attempt is not None
        for group in world.topology.groups:
            runs = decided.mode == Mode.RUN or (decided.mode == Mode.ENGINES_ONLY and group.role == "generation")
            world.sets[group.statefulset] = StatefulSet(group.spec.replicas if runs else 0, decided.status.created_for)
        for name, uid in decided.renewals:
            if name in world.pods and world.pods[name].uid == uid:
                world.pods[name] = replace(world.pods[name], told=decided.status.attempt, ready=False)

    def check_it_settles(self, status: GRPOJobStatus, observed: Observed, reports: dict[str, Progress]) -> None:
        """Assert that repeated passes over the same facts stop changing the status."""
        for _ in range(6):
            again = plan(self.world.job, self.world.topology, status, observed, reports, self.world.time).status
            if again == status:
                return
            status = again
        raise AssertionError("six passes over the same facts have each changed the status")

    def check_it_is_true(self, status: GRPOJobStatus, observed: Observed) -> None:
        """Assert that a status says what the pass that wrote it has seen."""
        generations = {status.observed_generation, *(one.observed_generation for one in status.conditions)}
        assert generations == {self.world.job.generation}
        seen = [observed.pods.get(name) for name in self.world.topology.needed_pods]
        own = [pod for pod in seen if pod is not None and pod.attempt == status.created_for]
        ready = sum(pod.ready for pod in observed.pods.values() if pod.attempt == status.created_for)
        assert not holds(status, Condition.SCHEDULED) or [pod.node is not None for pod in own] == [True] * len(seen)
        assert not holds(status, Condition.RUNNING) or [pod.ready for pod in own] == [True] * len(seen)
        assert not holds(status, Condition.HUNG) or own
        assert status.attempt is None or sum(group.ready for group in status.groups) <= ready
        assert (status.elastic is None) == (self.engines is None or status.attempt is None)
        if is_terminal(status) or is_between_attempts(status):
            assert not holds(status, Condition.SCHEDULED)
            assert not holds(status, Condition.RUNNING)
        rests = status.phase == "Suspended" and not observed.pods and self.world.job.spec.suspend
        assert holds(status, Condition.STALLED) == (status.phase == "Failed")
        assert holds(status, Condition.RECONCILING) == (
            status.phase not in ("Running", "Succeeded", "Failed") and not rests
        )

    def check_transition(self, old: GRPOJobStatus, new: GRPOJobStatus, observed: Observed) -> None:
        if is_terminal(old):
            kept = ("attempt", "phase", "restarts", "last_failure", "completion_time", "active_seconds")
            assert [getattr(new, name) for name in kept] == [getattr(old, name) for name in kept], "an end is permanent"
        before, now = old.attempt if old.attempt is not None else -1, new.attempt if new.attempt is not None else -1
        assert now - before in (0, 1)
        if now > before:
            assert is_about_to_begin(self.world.job, old, observed, self.world.time), "the reconciler foresaw it"
            if keeps_pods(old):
                assert [pod.uid for pod in observed.pods.values()] == [one.uid for one in old.members], "the same pods"
                assert all(
                    pod.outcome for name, pod in observed.pods.items() if name in self.world.topology.trainer_pods
                )
            else:
                assert not observed.pods, "an attempt begins only when no pod is left"
            assert new.members == ()
        assert 0 <= new.restarts.total - old.restarts.total <= 1
        assert abs(new.restarts.counted - old.restarts.counted) <= 1
        if new.restarts.total > old.restarts.total:
            assert new.last_failure is not None
            needed = self.world.topology.needed_pods
            placed = sum(pod.node is not None for name, pod in observed.pods.items() if name in needed)
            in_part = 0 < placed < len(needed)
            assert in_part or new.last_failure.reason != "PlacementTimeout", "pods hold nodes, and others have none"
            assert not is_between_attempts(old), "the failure of an attempt is counted once"

    # What happens in the cluster.

    @rule()
    def controllers(self) -> None:
        self.world.controllers()

    @rule()
    def all_become_ready(self) -> None:
        world = self.world
        for name, pod in world.pods.items():
            if pod.deletion_time is None and world.runs(pod):
                world.pods[name] = replace(pod, ready=True)

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data(), code=st.sampled_from([ExitCode.RANK_FAILED, 137, -1, *ExitCode]), passes=PASSES)
    def one_ends(self, data: st.DataObject, code: int, passes: int) -> None:
        world = self.world
        name = data.draw(st.sampled_from(sorted(world.pods)))
        pod = world.pods[name]
        if world.runs(pod):
            world.end(pod, code, "PeerLost")
        self.undisturbed(passes, seconds=8)

    @rule(passes=PASSES)
    def one_rank_fails_and_the_others_lose_it(self, passes: int) -> None:
        world = self.world
        codes = itertools.chain([ExitCode.RANK_FAILED], itertools.repeat(ExitCode.PEER_LOST))
        for name, pod in list(world.pods.items()):
            if name in world.topology.trainer_pods and world.runs(pod):
                world.end(pod, next(codes), "PeerLost")
        self.undisturbed(passes, seconds=8)

    @rule()
    def all_are_done(self) -> None:
        world = self.world
        for name, pod in list(world.pods.items()):
            if name in world.topology.trainer_pods and pod.ready and world.runs(pod):
                world.end(pod, ExitCode.DONE, "Done")

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data(), evict=st.booleans(), force=st.booleans(), passes=PASSES)
    def one_is_deleted(self, data: st.DataObject, evict: bool, force: bool, passes: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.pods)))
        if evict:
            gone = Disruption(reason="Evicted", message="drain")
            self.world.pods[name] = replace(self.world.pods[name], disruption=gone)
        self.world.delete(name, force=force)
        self.undisturbed(passes, seconds=8)

    @rule(node=st.sampled_from(NODES), passes=PASSES)
    def a_node_is_lost_or_returns(self, node: str, passes: int) -> None:
        world = self.world
        if world.lost.pop(node, None) is None:
            world.lost[node] = world.now
            for name, pod in world.pods.items():
                if pod.node == node:
                    world.pods[name] = replace(pod, ready=False)
        self.undisturbed(passes, seconds=20)

    @rule(room=st.sampled_from([1, 2, 0, 9]), passes=PASSES)
    def others_take_or_leave_nodes(self, room: int, passes: int) -> None:
        self.world.room = room
        self.undisturbed(passes, seconds=20)

    @rule(seconds=st.sampled_from([1, 3, 20, 70, 700, 2000]))
    def time_passes(self, seconds: int) -> None:
        self.world.now += seconds

    @rule(passes=PASSES)
    def the_world_hangs_or_moves(self, passes: int) -> None:
        self.hung = not self.hung
        self.undisturbed(passes, seconds=8)

    @rule(suspend=st.booleans(), deadline=st.none() | st.just(3000), passes=PASSES)
    def the_user_edits(self, suspend: bool, deadline: int | None, passes: int) -> None:
        changes = {"suspend": suspend} | ({"activeDeadlineSeconds": deadline} if deadline else {})
        made = job(**self.spec, **changes)
        self.world.job, self.world.topology = (
            replace(made, generation=self.world.job.generation + 1),
            plan_topology(made),
        )
        self.undisturbed(passes, seconds=8)

    @precondition(lambda self: self.engines is not None)
    @rule(engines=st.integers(1, 3), passes=PASSES)
    def the_user_scales(self, engines: int, passes: int) -> None:
        self.engines = engines
        self.spec |= self.generation()
        before = self.world.job.spec
        self.the_user_edits(before.suspend, before.active_deadline_seconds, passes)

    # What holds at every moment.

    @invariant()
    def budget_is_kept(self) -> None:
        restarts = self.world.status.restarts
        assert 0 <= restarts.counted <= self.world.job.spec.failure_policy.max_restarts
        assert restarts.counted <= restarts.total

    @invariant()
    def there_is_one_end_at_most(self) -> None:
        status = self.world.status
        assert not (holds(status, Condition.COMPLETE) and holds(status, Condition.FAILED))
        if is_terminal(status):
            assert status.completion_time is not None
            assert status.next_restart_time is None

    @invariant()
    def pods_are_of_one_attempt(self) -> None:
        """Pods that live belong to one attempt; pods on a lost node cannot be ended, only fenced off the storage."""
        ready = {attempt_in(pod) for pod in self.world.pods.values() if pod.ready and pod.deletion_time is None}
        assert len(ready) <= 1 or self.world.status.attempt in ready

    def undisturbed(self, passes: int, *, seconds: int) -> None:
        """Run whole passes of the first operator; the cluster does its work between them."""
        for _ in range(passes):
            self.world.controllers()
            self.all_become_ready()
            self.read(0)
            self.decide_and_write(0, lose=False)
            self.carry_out(0, cut=False)
            self.world.now += seconds

    def teardown(self) -> None:
        """With a healthy cluster and one operator, the job ends or waits for its user in a limited number of passes."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.lost.clear()
        world.room = 9
        self.hung = False
        self.operators = [Operator(), Operator()]
        self.undisturbed(40, seconds=30)
        if any(member.outcome for member in world.status.members) and not is_terminal(world.status):
            self.all_are_done()  # some pods are done; the others finish too
            self.undisturbed(3, seconds=30)
        status = world.status
        assert (
            world.deleted or is_terminal(status) or holds(status, Condition.SUSPENDED) or status.phase == "Running"
        ), status.phase
        if world.deleted:
            return
        if is_terminal(status) or holds(status, Condition.SUSPENDED):
            assert not world.pods, "GPUs are given back"
        else:
            assert {attempt_in(pod) for pod in world.pods.values()} == {status.attempt}
            assert {member.uid for member in status.members} == {pod.uid for pod in world.pods.values()}


Survival.TestCase.settings = settings(max_examples=200, stateful_step_count=50, print_blob=True)
TestSurvival = Survival.TestCase
