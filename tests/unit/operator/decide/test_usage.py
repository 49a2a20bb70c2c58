"""The bill of GPU seconds: what pods held, and what for."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.times import after
from grpo_operator.api.usage_status import PARTS
from grpo_operator.decide.observe import read_child
from grpo_operator.decide.observed_pod import Ending, ObservedPod
from grpo_operator.decide.plan import plan
from grpo_spec.reports import ExitCode, GpuUse, Progress
from support.control_plane.jobs import NOW, ended, observed, world
from support.control_plane.jobs import pod as make_pod

SETS = tuple(
    read_child("StatefulSet", {"metadata": {"name": f"job-{group}", "namespace": "ns", "uid": f"set-{group}"}})
    for group in ("a", "b", "gen")
)
FIXED: dict[str, Any] = {"storage": {"claimName": "claim"}, "failurePolicy": {"backoffSeconds": 0, "maxRestarts": 9}}


class World:
    """A job, its pods, an operator, and what they really held. Times are seconds since the job began."""

    def __init__(self, **spec: Any) -> None:
        self.spec = FIXED | spec
        self.job, self.topology = world(**self.spec)
        self.status = GRPOJobStatus()
        self.at, self.skew, self.made = 0, 0, 0
        self.truth = 0  # GPU seconds
        self.begun = 0  # GPUs of all pods that ever began
        self.pods: dict[str, ObservedPod] = {}
        self.gone: dict[str, ObservedPod] = {}
        self.said: Progress | None = None

    def gpus(self, pod: ObservedPod) -> int:
        return {group.name: group.gpus for group in self.topology.groups}[pod.group]

    def tick(self, seconds: int) -> None:
        self.at += seconds
        self.truth += seconds * sum(self.gpus(pod) for pod in self.pods.values() if pod.scheduled)

    def begin(self, name: str, *, ready: bool = True) -> None:
        """A pod of the current attempt gets a node, unless it exists."""
        if name in self.pods or self.status.attempt is None:
            return
        self.made += 1
        group = next(group.name for group in self.topology.groups if name in group.possible_pods)
        fresh = make_pod(name, uid=f"{name}-{self.made}", ready=ready, attempt=self.status.attempt)
        fresh = replace(fresh, group=group, controller=f"set-{group}", scheduled=after(NOW, self.at))
        self.pods[name] = fresh
        self.begun += self.gpus(fresh)

    def begin_all(self) -> None:
        for name in self.topology.pods:
            self.begin(name)

    def end(self, name: str, code: int) -> None:
        """The launcher of a pod ends; its container waits."""
        if name in self.pods:
            outcome = ended(code, "Done" if code == ExitCode.DONE else "RankFailed", after(NOW, self.at))
            ending = Ending(outcome, self.pods[name].attempt, self.said if name == "job-a-0" else None)
            self.pods[name] = replace(self.pods[name], ready=False, endings=(ending,))

    def remove(self, name: str) -> None:
        """A pod is gone."""
        if name in self.pods:
            pod = self.pods.pop(name)
            self.gone[pod.uid] = replace(pod, gone_at=after(NOW, self.at + self.skew))

    def remove_all(self) -> None:
        for name in [*self.pods]:
            self.remove(name)

    def begin_attempt(self) -> None:
        """The operator begins an attempt, and sees all of its pods."""
        self.look()
        self.begin_all()
        self.look()

    def lose_all(self) -> None:
        """All pods are gone, and the operator has a pass."""
        self.remove_all()
        self.look()

    def look(self, *, dies: bool = False) -> GRPOJobStatus:
        """The operator has a pass; if it `dies`, before it writes, and with all that it remembers."""
        there = [pod for pod in self.pods.values() if pod.outcome is None]
        reports = {"job-a-0": self.said} if self.said and any(pod.name == "job-a-0" for pod in there) else {}
        seen = observed(*self.pods.values(), gone=dict(self.gone), children=SETS)
        new = plan(self.job, self.topology, self.status, seen, reports, after(NOW, self.at + self.skew)).status
        if not dies:
            self.status = new
        self.gone.clear()
        return self.status

    def report(self, phase: str, step: int = 0, checkpoint: int | None = None, **use: float) -> None:
        known = GpuUse(attempt=self.status.attempt or 0, **use) if use else None
        said = {"step": step, "total_steps": 100, "phase": phase, "checkpoint_step": checkpoint}
        self.said = Progress(**said, gpu_use=known, reward=0.0)

    def tell(self, *said: Any, **use: float) -> None:
        """Rank 0 reports, and the operator has a pass."""
        self.report(*said, **use)
        self.look()

    @property
    def bill(self) -> dict[str, int]:
        return self.status.usage.gpu_seconds if self.status.usage else dict.fromkeys(("held", *PARTS), 0)

    def shows(self, **seconds: int) -> bool:
        return {name: number for name, number in self.bill.items() if number} == seconds


def _running(**spec: Any) -> World:
    """A job whose three GPUs loaded for 100 s and then trained and sampled for 50 s, of which rank 0 told."""
    at = World(**spec)
    at.begin_attempt()
    at.tick(100)
    at.tell("Loading")
    at.report("Generating")
    at.tick(50)
    at.tell("Generating", 1, training=60.0, sampling=60.0, waiting=30.0)
    return at


def test_what_is_held_counts_from_the_scheduling_and_what_for_from_reports() -> None:
    at = _running()
    assert at.shows(held=450, loading=300, training=60, sampling=60, waiting=30)
    at.tick(10)
    at.tell("Training", 1, training=60.0, sampling=60.0, waiting=30.0)
    assert at.bill["held"] == 450, "the bill alone is no reason to write"
    at.tell("Training", 2, training=60.0, sampling=60.0, waiting=30.0)
    assert at.shows(held=480, loading=300, training=90, sampling=60, waiting=30), "the rest goes to the phase"
    at.tick(10)
    at.tell("Generating", 3, training=70.0, sampling=100.0, waiting=40.0)
    assert at.shows(held=510, loading=300, training=90, sampling=84, waiting=36), "what was too much is made up for"
    at.tick(10)
    at.tell("Generating", 4, training=90.0, sampling=105.0, waiting=45.0)
    assert at.shows(held=540, loading=300, training=90, sampling=105, waiting=45)


def test_an_attempt_that_fails_loses_what_it_did_since_its_checkpoint() -> None:
    at = _running()
    at.tick(10)
    at.tell("Training", 10, 10, training=90.0, sampling=60.0, waiting=30.0)
    at.tick(10)
    at.end("job-b-0", ExitCode.RANK_FAILED)
    at.look()
    assert at.status.phase == "Restarting"
    assert at.bill["lost"] == 0, "it may still save"
    at.tick(5)
    at.lose_all()
    # 30 s of all until the failure and 10 s of two until the end are lost, 5 s of one were idle
    assert at.shows(held=525, loading=300, training=90, sampling=60, waiting=30, lost=40, idle=5)
    at.begin_attempt()
    at.tick(20)
    at.report("Loading")
    at.end("job-b-0", ExitCode.RANK_FAILED)
    at.look()
    at.lose_all()
    assert at.bill["lost"] == 100, "an attempt without a checkpoint loses also its loading"
    assert at.bill["held"] == at.truth


def test_a_job_that_completes_loses_nothing_and_its_pods_count_until_they_are_gone() -> None:
    at = _running()
    at.tick(20)
    at.report("Done", 100, 100, training=100.0, sampling=80.0, waiting=30.0)
    at.end("job-a-0", ExitCode.DONE)
    at.end("job-b-0", ExitCode.DONE)
    at.tick(2)
    at.look()
    assert at.status.phase == "Succeeded"
    at.tick(30)
    at.lose_all()
    assert at.shows(held=606, loading=300, training=100, sampling=80, waiting=30, idle=96)
    assert at.truth == 606
    assert not at.status.usage.attempt
    assert not at.status.usage.unsaved


def test_without_a_claim_every_restart_loses_everything() -> None:
    at = _running(storage={})
    at.tell("Training", 10, 10, training=60.0, sampling=60.0, waiting=30.0)
    at.end("job-b-0", ExitCode.RANK_FAILED)
    at.look()
    at.lose_all()
    assert at.shows(held=450, lost=450)


def _served(engines: int = 1) -> dict[str, Any]:
    server = {"groups": [{"name": "gen", "replicas": 1, "gpus": 4}], "elastic": {"replicas": engines, "maxReplicas": 3}}
    policy = FIXED["failurePolicy"] | {"onGenerationFailure": "RestartGeneration"}
    return {"generation": {"topology": "Server", "server": server}, "failurePolicy": policy}


def test_engines_sample_or_are_idle_and_load_when_they_join() -> None:
    at = World(**_served())
    at.begin_attempt()
    at.report("Generating")
    at.tick(10)
    at.tell("Generating", 1)
    assert at.shows(held=70, waiting=30, sampling=40), "ranks wait for engines"
    at.begin("job-gen-1", ready=False)
    at.tick(10)
    at.tell("Training", 2, training=30.0, waiting=30.0, sampling=60.0, idle=20.0)
    assert at.shows(held=180, training=30, waiting=30, sampling=60, idle=20, loading=40)
    at.tick(5)
    at.remove("job-gen-1")
    at.look()
    assert at.bill["held"] == at.truth == 235, "the end of a pod is written"


def test_an_operator_that_was_away_counts_pods_that_are_still_there_as_ranks_report() -> None:
    at = _running()
    at.tick(3600)
    at.look(dies=True)
    at.said = None
    at.look()
    at.tell("Training", 9, training=5000.0, sampling=5000.0, waiting=950.0)
    assert at.bill["held"] == at.truth
    assert at.shows(held=11250, loading=300, training=5000, sampling=5000, waiting=950)


def test_a_silent_launcher_leaves_the_shares_as_they_were() -> None:
    at = _running()
    at.said = None
    at.tick(50)
    at.end("job-b-0", ExitCode.RANK_FAILED)
    at.look()
    assert at.bill["training"] == at.bill["sampling"] == 120
    assert at.bill["waiting"] == 60


def test_reports_of_an_earlier_attempt_and_absurd_ones_explain_nothing() -> None:
    at = _running()
    at.tick(10)
    at.report("Training", 4, training=1e300)
    at.said = at.said.model_copy(update={"gpu_use": GpuUse(attempt=7, training=60.0, waiting=9e9)})
    at.look()
    assert at.bill["waiting"] == 36, "as before, since nobody tells"
    at.tell("Training", 5, training=1e300)
    assert at.bill["held"] == sum(at.bill[name] for name in PARTS) == 480


def test_no_moment_counts_twice_however_often_the_clock_jumps() -> None:
    at = _running()
    at.end("job-b-0", ExitCode.RANK_FAILED)
    for step in range(9):
        at.skew = 7
        at.tell("Training", step)
        at.skew = 0
        at.look()
    at.tick(7)
    at.lose_all()
    assert at.bill["held"] == at.truth == 471


def test_pods_without_gpus_are_nothing() -> None:
    at = World(device={"type": "cpu"})
    at.begin_attempt()
    at.tick(100)
    at.tell("Training", 3, training=60.0)
    assert at.status.usage is None


_MOVES = st.one_of(
    st.tuples(st.just("tick"), st.integers(0, 400)),
    st.tuples(st.sampled_from(["begin", "remove", "kill", "done", "unready"]), st.integers(0, 4)),
    st.tuples(st.just("report"), st.integers(0, 12)),
    st.tuples(st.sampled_from(["look", "look", "begin_all", "remove_all", "restart", "silence"]), st.just(0)),
    st.tuples(st.just("scale"), st.integers(1, 3)),
    st.tuples(st.just("jump"), st.integers(-500, 500)),
    st.tuples(st.just("suspend"), st.integers(0, 1)),
)


@pytest.mark.parametrize("honest", [True, False], ids=["one operator", "kills and jumps"])
@given(moves=st.lists(_MOVES, min_size=8, max_size=40), uses=st.lists(st.floats(0, 900), min_size=4, max_size=4))
def test_parts_add_up_to_what_was_held_whatever_happens(
    moves: list[tuple[str, int]], uses: list[float], *, honest: bool
) -> None:
    """With one operator that sees all, what is held is also what the pods really held; else it is never more.

    Parts only grow, except by what an attempt loses.
    """
    at, step, ahead = World(**_served()), 0, 0
    names = ["job-a-0", "job-b-0", "job-gen-0", "job-gen-1", "job-gen-2"]
    for what, number in [("look", 0), ("begin_all", 0), *moves, ("look", 0)]:
        before = at.bill
        if what == "tick":
            at.tick(number)
        elif what == "begin":
            at.begin(names[number])
        elif what == "remove":
            at.remove(names[number])
        elif what in ("kill", "done"):
            at.end(names[number], ExitCode.RANK_FAILED if what == "kill" else ExitCode.DONE)
        elif what == "unready" and names[number] in at.pods:
            at.pods[names[number]] = replace(at.pods[names[number]], ready=False)
        elif what == "report":
            step += number
            share = dict(zip(("training", "sampling", "waiting", "idle"), uses, strict=True))
            grown = {name: seconds * step for name, seconds in share.items()}
            phase = ["Loading", "Generating", "Training", "Agreeing", "Done"][number % 5]
            at.report(phase, step, step - step % 3 or None, **(grown if step else {}))
        elif what == "silence":
            at.said = None
        elif what in ("begin_all", "remove_all"):
            getattr(at, what)()
        elif what == "scale":
            at.spec |= _served(number)
            at.job, at.topology = world(**at.spec)
        elif what == "suspend":
            at.spec |= {"suspend": bool(number)}
            at.job, at.topology = world(**at.spec)
        elif what == "restart" and not honest:
            at.look(dies=True)
        elif what == "jump" and not honest:
            at.skew += number
        else:
            at.look()
        bill = at.bill
        assert sum(bill[name] for name in PARTS) == bill["held"]
        assert all(seconds >= 0 for seconds in bill.values())
        lost = bill["lost"] - before["lost"]
        assert lost >= 0
        assert bill["held"] >= before["held"]
        assert sum(max(0, before[name] - bill[name]) for name in PARTS) <= lost
        assert bill["idle"] >= before["idle"]
        ahead = max(ahead, at.skew)
        assert bill["held"] <= at.truth + ahead * at.begun, "of no pod does a moment count twice"
    at.lose_all()
    if honest:
        assert at.bill["held"] == at.truth
