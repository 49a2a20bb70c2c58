"""The operator's decisions, one look at a time, and over random histories."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from jobs import NOW, ended, observed, pod, world

from grpo_operator.jobstatus import GRPOJobStatus
from grpo_operator.names import Condition
from grpo_operator.observe import ObservedPod
from grpo_operator.plan import Plan, plan, refuse
from grpo_operator.status import find, holds, is_terminal
from grpo_workload.contract import ExitCode, Progress

JOB, TOPOLOGY = world()
A, B = (member.pod for member in TOPOLOGY.members)


def look(
    status: GRPOJobStatus, *pods: ObservedPod, progress: Progress | None = None, now: str = NOW, foreign: tuple[str, ...] = ()
) -> Plan:
    return plan(JOB, TOPOLOGY, status, observed(*pods, foreign=foreign), progress, now)


def started() -> GRPOJobStatus:
    return look(GRPOJobStatus(), pod(A, ready=True), pod(B, ready=True)).status


def test_the_first_look_accepts_and_asks_for_the_children() -> None:
    first = look(GRPOJobStatus())
    assert first.status.epoch == 0
    assert first.replicas == "run"
    assert find(first.status, Condition.ACCEPTED).message == "3 ranks on 2 pods (a 1 x 2, b 1 x 1)"
    assert [e.reason for e in first.events] == ["Accepted", "RestartsFromStepZero"]


def test_nothing_is_made_while_an_earlier_job_of_the_name_still_has_children() -> None:
    waiting = look(GRPOJobStatus(), foreign=("pod/job-a-0",))
    assert waiting.replicas == "keep"
    assert waiting.status.epoch is None
    assert "pod/job-a-0" in find(waiting.status, Condition.SCHEDULED).message


def test_running_once_every_pod_is_ready() -> None:
    starting = look(started(), pod(A, ready=True), pod(B))
    assert starting.status.phase == "Starting"
    assert look(starting.status, pod(A, ready=True), pod(B, ready=True)).status.phase == "Running"


def test_rank_0_says_whom_it_waits_for() -> None:
    progress = Progress(phase="WaitingForPeers", waiting_for=("job-b-0: DNS: no such name",))
    told = look(GRPOJobStatus(), pod(A), pod(B), progress=progress)
    running = find(told.status, Condition.RUNNING)
    assert (running.status, running.reason) == ("False", "WaitingForPeers")
    assert "job-b-0: DNS" in running.message


def test_a_container_that_cannot_start_is_told_with_its_pod() -> None:
    stuck = replace(pod(B), waiting="ErrImagePull: no such image")
    running = find(look(GRPOJobStatus(), pod(A), stuck).status, Condition.RUNNING)
    assert running.reason == "ContainerWaiting"
    assert running.message == f"pod {B} on node node: ErrImagePull: no such image"


def test_outcomes_are_recorded_at_first_sight_and_outlive_the_pod() -> None:
    one = look(started(), pod(A, outcome=ended(0)), pod(B, ready=True)).status
    two = look(one, pod(A, uid="another"), pod(B, outcome=ended(0)))
    assert holds(two.status, Condition.COMPLETE)
    assert two.replicas == "zero"
    assert two.requeue_after is None


def test_a_lost_peer_is_the_verdict_only_after_a_while() -> None:
    lost = pod(A, outcome=ended(ExitCode.PEER_LOST, "PeerLost"))
    soon = look(started(), lost, pod(B, ready=True))
    assert not is_terminal(soon.status)
    assert find(look(soon.status, lost, pod(B), now="2026-01-01T00:00:05Z").status, Condition.FAILED).reason == "PeerLost"
    culprit = pod(B, outcome=ended(ExitCode.RANK_FAILED, "RankFailed", "2026-01-01T00:00:01Z"))
    assert look(soon.status, lost, culprit).status.last_failure.pod == B


def test_a_restarted_container_without_a_result_is_a_lost_outcome() -> None:
    told = look(started(), pod(A, restarts=1), pod(B)).status
    assert find(told, Condition.FAILED).reason == "OutcomeLost"


def test_progress_is_written_on_a_new_step_and_not_too_often() -> None:
    def at(step: int) -> Progress:
        return Progress(step=step, total_steps=40, reward=0.123456)

    pods = (pod(A, ready=True), pod(B, ready=True))
    first = look(started(), *pods, progress=at(1)).status
    assert first.summary.step == "1/40"
    assert look(first, *pods, progress=at(2), now="2026-01-01T00:00:09Z").status.progress.step == 1
    later = look(first, *pods, progress=at(2), now="2026-01-01T00:00:10Z").status
    assert (later.progress.step, later.progress.reward) == (2, 0.1235)
    assert look(later, *pods, progress=None, now="2026-01-01T01:00:00Z").status.progress == later.progress


def test_a_refusal_is_told_once() -> None:
    first = refuse(GRPOJobStatus(), 1, "InvalidSpec", "spec.model: wrong", NOW)
    assert [e.reason for e in first.events] == ["InvalidSpec"]
    again = refuse(first.status, 1, "InvalidSpec", "spec.model: wrong", NOW)
    assert again.status == first.status
    assert not again.events


def test_looking_twice_changes_nothing() -> None:
    pods = (pod(A, ready=True), pod(B, ready=True))
    once = look(started(), *pods).status
    again = look(once, *pods, now="2026-01-01T05:00:00Z")
    assert again.status == once
    assert not again.events


CODES = st.sampled_from([*ExitCode, -1, 137])
STATES = st.builds(
    lambda uid, ready, restarts, code: pod("", uid=uid, ready=ready, restarts=restarts, outcome=None if code is None else ended(code, "R")),
    st.sampled_from(["1", "2"]),
    st.booleans(),
    st.integers(0, 1),
    st.none() | CODES,
)


@given(st.lists(st.tuples(st.none() | STATES, st.none() | STATES), max_size=12))
def test_over_any_history_the_end_is_final_and_outcomes_stay(history: list[tuple[ObservedPod | None, ObservedPod | None]]) -> None:
    status = GRPOJobStatus()
    for second, states in enumerate(history):
        pods = [replace(state, name=name) for state, name in zip(states, (A, B), strict=True) if state is not None]
        before, decided = status, look(status, *pods, now=f"2026-01-01T00:00:{second * 3:02}Z")
        status = decided.status
        recorded = {m.pod: m.outcome for m in before.members if m.outcome}
        assert recorded.items() <= {m.pod: m.outcome for m in status.members}.items()
        assert {m.pod: m.uid for m in before.members}.items() <= {m.pod: m.uid for m in status.members}.items()
        assert not (holds(status, Condition.COMPLETE) and holds(status, Condition.FAILED))
        if is_terminal(before):
            assert status == before
        assert decided.replicas == ("zero" if is_terminal(status) else "run")
        if holds(status, Condition.COMPLETE):
            assert all(m.outcome.exit_code == 0 for m in status.members)
