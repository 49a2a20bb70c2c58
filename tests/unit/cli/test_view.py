"""The screen of a job: what it shows of progress, failures, pods and events, and what to do about each reason."""

import io
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grpo_cli.screen.cures import CURES
from grpo_cli.screen.terminal import line, screen, show
from grpo_cli.screen.training import LauncherReport
from grpo_cli.screen.view import JobView, make_view
from grpo_operator.api import names
from grpo_spec.reports import EvaluationProgress, Progress
from support.control_plane.jobs import spec
from support.paths import DOCS

NOW = datetime(2026, 1, 1, 1, 0, tzinfo=UTC)
START = "2026-01-01T00:00:00Z"
FRAMES = "\n".join(f"frame {number}" for number in range(30))
TRACEBACK = f"rank 2: ValueError: bad batch\n{FRAMES}\nValueError: bad batch"


def condition(kind: str, value: str, reason: str, message: str) -> dict[str, Any]:
    told = {"type": kind, "status": value, "reason": reason, "message": message}
    return told | {"lastTransitionTime": START, "observedGeneration": 1}


def job(phase: str, *conditions: dict[str, Any], spec_: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    first = conditions[0] if conditions else {"reason": "", "message": ""}
    base: dict[str, Any] = {"phase": phase, "observedGeneration": 1, "attempt": 0, "conditions": list(conditions)}
    base["summary"] = {"reason": first["reason"], "message": first["message"]}
    base["groups"] = [
        {"name": name, "role": "trainer", "desired": 1, "ready": ready, "incarnation": 0}
        for name, ready in (("a", 1), ("b", 0))
    ]
    metadata = {"namespace": "team", "name": "math", "uid": "u", "creationTimestamp": START, "generation": 1}
    return {"metadata": metadata, "spec": spec(**(spec_ or {})), "status": base | status}


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "labels": {}}, "spec": {"nodeName": "n1"}, "status": status}


READY = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.1"}
RUNNING = condition("Running", "True", "AllRanksRunning", "all 2 pods are ready")
PROGRESS = {"step": 12, "totalSteps": 40, "reward": 0.43, "metrics": {"step_time": 8.0}, "checkpointStep": 10}
PROGRESS |= {"time": START}
POD = {"pod": "math-b-0", "role": "trainer", "node": "n2"}
FAILURE = POD | {"exitCode": 70, "reason": "RankFailed", "message": TRACEBACK, "time": "2026-01-01T00:50:00Z"}
UNCOUNTED = "this restart does not count towards failurePolicy.maxRestarts"


def view(job: dict[str, Any], *pods: dict[str, Any], events: Any = (), **report: Any) -> JobView:
    return make_view(job, pods, events, LauncherReport(**report), NOW)


def event(kind: str, name: str, type_: str, message: str, minute: int, reason: str = "R", uid: str = "") -> Any:
    about = {"kind": kind, "name": name, "uid": uid}
    told = {"type": type_, "reason": reason, "message": message, "lastTimestamp": f"2026-01-01T00:{minute}:00Z"}
    return told | {"involvedObject": about, "metadata": {"creationTimestamp": START}}


def text(view: JobView) -> str:
    out = io.StringIO()
    show(Console(file=out, width=10_000), screen(view))
    return out.getvalue()


def test_a_running_job_shows_its_progress_and_when_it_ends() -> None:
    rows = [{"step": n, "reward": n / 10, "rewards/accuracy/mean": n / 20, "step_time": 6.0} for n in range(5)]
    live = Progress(step=13, total_steps=40, reward=0.4, step_seconds=10.0, tokens_per_second=99.6)
    running = job("Running", RUNNING, progress=PROGRESS)
    shown = text(view(running, pod("math-a-0", **READY), progress=live, metrics=rows))

    assert "team/math  Running  1h00m old" in shown
    assert "13/40 steps · 32% · ETA 4m30s" in shown
    assert re.search(r"reward +▁\S+█  0.000 → 0.400 in 5 steps", shown)
    assert re.search(r"accuracy +▁\S+█  0.000 → 0.200", shown)
    assert "10.0 s a step · 100 tokens/s" in shown
    assert "to do" not in shown


def test_the_last_steps_episodes_are_shown_with_what_failed_and_what_waits() -> None:
    metrics = {"tools/call_frequency": 1.8, "tools/failure_frequency": 0.04, "episodes/turns/mean": 2.8}
    metrics |= {"episodes/call_seconds/mean": 1.25, "episodes/wait_seconds/mean": 3.5, "episodes/retries": 4.0}
    metrics |= {"episodes/lost": 3.0, "episodes/lost/timeout": 2.0, "episodes/lost/process": 1.0}
    live = Progress(step=13, total_steps=40, metrics=metrics, waiting_episodes=12)
    shown = text(view(job("Running", RUNNING, progress=PROGRESS), progress=live))
    expected = (
        "2.8 turns and 1.8 calls (4% failed) · 1.2 s in calls · 3.5 s until a session was free · 4 began again · "
        "3 lost (2 timeout, 1 process) · 12 of rank 0's pod wait for a session now"
    )
    assert re.search(rf"\nepisodes +{re.escape(expected)}\n", shown), shown
    assert "episodes" not in text(view(job("Running", RUNNING, progress=PROGRESS)))


def test_advice_is_shown_from_the_launcher_or_else_from_the_status() -> None:
    stored = job("Running", RUNNING, progress=PROGRESS | {"advice": "run 3 engines in place of 2 [dim]"})
    live = Progress(step=13, total_steps=40, advice="run 4 engines in place of 2")
    assert re.search(r"\nadvice +run 3 engines in place of 2 \[dim\]\n", text(view(stored)))
    assert re.search(r"\nadvice +run 4 engines in place of 2\n", text(view(stored, progress=live)))
    balanced = Progress(step=13, total_steps=40)
    assert "advice" not in text(view(stored, progress=balanced))
    without = job("Running", RUNNING, progress=PROGRESS)
    assert "advice" not in text(view(without))
    assert "advice" not in text(view(without, progress=live)), (
        "engines are missing: see the operator's decide/scaling.py"
    )


def test_a_new_attempt_shows_the_checkpoint_of_the_last_one() -> None:
    live = Progress(step=11, total_steps=40)
    stored = job("Running", RUNNING, progress=PROGRESS, spec_={"storage": {"claimName": "runs"}})
    assert "checkpoint at step 10" in text(view(stored, progress=live))


def test_the_newest_exported_model_is_shown_with_the_command_that_fetches_it() -> None:
    export = {"path": "team/math/u/exports/step-10", "bytes": 270_000_000}
    shown = text(view(job("Running", RUNNING, progress=PROGRESS, export=export)))
    assert "model           exported after 10 steps, 270,000,000 bytes: grpo export math FOLDER" in shown
    assert "exported" not in text(view(job("Running", RUNNING, progress=PROGRESS)))
    odd = text(view(job("Running", RUNNING, progress=PROGRESS, export=export | {"path": "of/another/release"})))
    assert "model           exported, 270,000,000 bytes" in odd


def test_the_last_evaluation_and_the_best_one_are_shown() -> None:
    tried = {"metric": "eval/reward", "step": 20, "value": 0.5, "bestStep": 10, "bestMetric": 0.71}
    stored = job("Running", RUNNING, progress=PROGRESS, evaluation=tried)
    assert "eval/reward 0.500 after 20 steps, best 0.710 after 10" in text(view(stored))
    said = EvaluationProgress(step=30, metric="eval/reward", value=0.8, best_step=30, best=0.8)
    live = Progress(step=31, total_steps=40, evaluation=said)
    assert "eval/reward 0.800 after 30 steps, the best so far" in text(view(stored, progress=live))
    assert "evaluated" not in text(view(job("Running", RUNNING, progress=PROGRESS)))


def test_without_an_answer_of_the_launcher_the_status_is_shown() -> None:
    shown = text(view(job("Running", RUNNING, progress=PROGRESS), note="pod math-a-0 does not answer"))

    assert "12/40 steps · 30% · ETA 3m44s" in shown
    assert re.search(r"reward +0.430", shown)
    assert "pod math-a-0 does not answer" in shown


def test_ranks_that_finish_no_step_are_shown_with_their_phases() -> None:
    live = Progress(step=13, total_steps=40, step_seconds=10.0, age_seconds=612)
    phases = {0: "Gathering", 1: "Gathering", 2: "Generating"}
    shown = text(view(job("Running", RUNNING), progress=live, rank_phases=phases))

    assert "no step for 10m12s" in shown
    assert re.search(r"\nranks +Generating: rank 2\n +Gathering: ranks 0-1\n", shown), "not below another row"


def test_the_rank_that_the_others_wait_for_is_shown() -> None:
    metrics = {"ranks/slowest": 2.0, "ranks/slowest_seconds": 9.1, "ranks/imbalance": 1.8}
    shown = text(view(job("Running", RUNNING, progress=PROGRESS | {"metrics": metrics})))
    assert "rank 2: 9.1 s of its own work a step, 1.8 times the mean" in shown


def test_missing_ranks_are_listed_by_cause() -> None:
    waits = condition("Scheduled", "False", "Unschedulable", "pod math-b-0: 0/8 nodes")
    unschedulable = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/8 nodes are available"}]}
    shown = text(view(job("Pending", waits), pod("math-a-0", **READY), pod("math-b-0", **unschedulable)))

    assert "math-b-0 (rank 2): no node fits: 0/8 nodes are available" in shown
    assert "ask for fewer: trainer.groups[].gpus" in shown
    none = text(view(job("Pending", waits), pod("math-a-0", **unschedulable), pod("math-b-0", **unschedulable)))
    assert "math-a-0, math-b-0 (ranks 0-2): no node fits: 0/8 nodes are available" in none
    gone = text(view(job("Starting", RUNNING | {"status": "False", "reason": "Starting"}), pod("math-a-0", **READY)))
    assert "math-b-0 (rank 2): does not exist yet" in gone


def test_a_waiting_container_shows_the_reason() -> None:
    container = {"name": "grpo", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}}
    waits = condition("Running", "False", "ContainerWaiting", "pod math-a-0: ErrImagePull")
    shown = text(view(job("Starting", waits), pod("math-a-0", containerStatuses=[container])))
    assert "math-a-0 (ranks 0-1): ErrImagePull: no such tag" in shown


def test_a_pod_on_a_node_that_does_not_answer_is_not_shown_as_starting() -> None:
    conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    lost = condition("Running", "False", "NodeNotReady", "node n1 of math-a-0 has not been ready since then")
    silent = pod("math-a-0", conditions=conditions, podIP="10.0.0.1")
    shown = text(view(job("Starting", lost, runningTime=START), silent))
    assert "math-a-0 (ranks 0-1): its node n1 does not answer" in shown
    assert "kubectl describe node" in shown
    assert "fails" not in shown


def test_a_job_that_waits_for_a_node_shows_when_it_gives_up() -> None:
    waits = condition("Scheduled", "False", "Unschedulable", "no room")
    shown = text(view(job("Pending", waits, attemptStartTime=START, spec_={"startupDeadlineSeconds": 7200})))
    assert re.search(r"fails +at 2026-01-01T02:00:00Z, in 1h00m, if not all pods are ready by then", shown)


def test_a_job_that_gave_its_gpus_back_shows_when_it_tries_again_and_when_it_gives_up() -> None:
    said = "1 of 2 pods had a node"
    restarting = condition("Restarting", "True", "PlacementTimeout", f"{said}; {UNCOUNTED}")
    made = job(
        "Restarting",
        restarting,
        lastFailure={"reason": "PlacementTimeout", "message": said, "time": START},
        placementTimeouts={"total": 2, "since": START},
        attemptStartTime="2026-01-01T00:40:00Z",
        nextRestartTime="2026-01-01T01:01:00Z",
        spec_={"startupDeadlineSeconds": 7200},
    )
    shown = text(view(made))
    assert f"why             PlacementTimeout, see below; {UNCOUNTED}" in shown
    assert "next attempt    not before 2026-01-01T01:01:00Z, in 1m00s" in shown
    assert re.search(r"fails +at 2026-01-01T02:00:00Z, in 1h00m", shown)
    assert CURES["PlacementTimeout"] in shown
    assert "last failure  PlacementTimeout  attempt 0, 1h00m ago\n  1 of 2 pods had a node" in shown


@pytest.mark.parametrize("reason", ["Evicted", "NodeLost"])
def test_a_disruption_names_the_node_and_the_next_attempt(reason: str) -> None:
    said = "evicted through the API"
    message = f"trainer pod math-b-0 on node n2: {said}; {UNCOUNTED}; next attempt not before then"
    restarting = condition("Restarting", "True", reason, message)
    failure = POD | {"reason": reason, "message": said, "time": START}
    shown = text(view(job("Restarting", restarting, lastFailure=failure, restarts={"total": 1, "counted": 0})))
    assert f"team/math  Restarting ({reason})" in shown
    assert f"why             {reason} of math-b-0, see below; {UNCOUNTED}" in shown
    assert "kubectl describe node n2" in shown
    assert f"last failure  {reason} pod math-b-0 on node n2  attempt 0" in shown


def test_a_failed_job_shows_the_end_of_the_log_and_a_cure_but_no_eta() -> None:
    said = "trainer pod math-b-0 on node n2, exit code 70: rank 2: ValueError: bad batch (more in status.lastFailure)"
    said += "; maxRestarts is 0"
    failed = condition("Failed", "True", "RankFailed", said)
    shown = text(view(job("Failed", failed, lastFailure=FAILURE, progress=PROGRESS)))

    assert "team/math  Failed (RankFailed)" in shown
    assert "last failure  RankFailed pod math-b-0 on node n2, exit code 70  attempt 0, 10m00s ago" in shown
    assert "rank 2: ValueError: bad batch\n  ...\n  frame" in shown
    assert shown.count("frame") == 19
    assert "frame 0\n" not in shown
    assert CURES["RankFailed"] in shown
    assert re.search(r"why +RankFailed of math-b-0, see below; maxRestarts is 0\n", shown)
    assert "ETA" not in shown
    assert "not ready" not in shown


def test_a_job_that_recovered_from_a_failure_shows_less_of_it() -> None:
    held = {"gpuSeconds": {"held": 1800, "training": 1620, "lost": 180}, "time": "2026-01-01T00:00:00Z"}
    shown = text(view(job("Running", RUNNING, lastFailure=FAILURE, restarts={"total": 3, "counted": 1}, usage=held)))
    assert re.search(r"held +30 GPU minutes: 90% training, 10% lost", shown)

    assert 0 < shown.count("frame") < 5
    assert re.search(r"restarts +1 of at most 3, and 2 that do not count", shown)
    assert "to do" not in shown


def test_a_restarting_job_shows_when_and_what_it_waits_for() -> None:
    restarting = condition("Restarting", "True", "Restarting", "rank 2 failed; restart 1 of 3")
    when = {"nextRestartTime": "2026-01-01T01:00:40Z", "restarts": {"total": 1, "counted": 1}}
    waiting = job("Restarting", restarting, lastFailure=FAILURE, **when)
    shown = text(view(waiting, pod("math-a-0", **READY)))

    assert "not before 2026-01-01T01:00:40Z, in 40s" in shown
    assert "math-a-0: being ended, with the last attempt" in shown
    assert CURES["RankFailed"] in shown
    due = job("Restarting", restarting, nextRestartTime="2026-01-01T00:59:00Z")
    assert "when the last attempt has no pod left" in text(view(due))


def test_environment_pods_are_shown_with_their_own_words_and_are_not_waited_for_between_attempts() -> None:
    spec_ = {"tools": [{"function": "m:f"}], "environmentPods": {"groups": [{"name": "boxes", "replicas": 2}]}}
    died = {"restartCount": 3, "lastState": {"terminated": {"exitCode": 1, "message": "boom", "reason": "Error"}}}
    loops = {"name": "grpo", **died, "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}}
    again = READY | {"containerStatuses": [{"name": "grpo", **died, "state": {"running": {}}}]}
    pods = [pod("math-a-0", **READY), pod("math-b-0", **READY)]
    pods += [pod("math-boxes-0", containerStatuses=[loops]), pod("math-boxes-1", **again)]
    for one in pods[2:]:
        one["metadata"]["labels"] = {names.LABEL_ROLE: "environment"}
    groups = [{"name": "boxes", "role": "environment", "desired": 2, "ready": 1, "incarnation": 0}]
    shown = text(view(job("Running", RUNNING, spec_=spec_, groups=groups), *pods))
    assert "math-boxes-0: ended 3 times, CrashLoopBackOff; the last one as Error: boom" in shown
    assert "math-boxes-1" not in shown
    assert re.search(r"boxes +environment +1/2 +2 x 0", shown)
    restarting = condition("Restarting", "True", "Restarting", "rank 2 failed; restart 1 of 3")
    left = text(view(job("Restarting", restarting, spec_=spec_, nextRestartTime=START), *pods[1:]))
    assert "math-b-0: being ended, with the last attempt" in left
    assert "math-boxes" not in left


def test_a_volume_that_cannot_be_mounted_is_why_a_pod_is_not_ready() -> None:
    creating = {"containerStatuses": [{"name": "grpo", "state": {"waiting": {"reason": "ContainerCreating"}}}]}
    missing = 'MountVolume.SetUp failed for volume "sums" : configmap "sums" not found'
    events = [
        event("Pod", "math-a-0", "Warning", message, minute, reason, uid)
        for uid, reason, message, minute in (
            ("math-a-0", "FailedMount", missing, 20),
            ("math-a-0", "FailedMount", "older", 10),
            ("math-a-0", "Unhealthy", "a probe's", 30),
            ("of-the-attempt-before", "FailedMount", "of another pod", 40),
        )
    ]
    starting = job("Starting", RUNNING | {"status": "False", "reason": "Starting"})
    shown = text(view(starting, pod("math-a-0", **creating), events=events))
    assert f"math-a-0 (ranks 0-1): ContainerCreating: {missing}" in shown
    began = text(view(starting, pod("math-a-0", **READY), events=events))
    assert "math-a-0 (ranks" not in began, "it has got over it"


def test_a_job_without_an_operator_says_so() -> None:
    unseen = job("Pending") | {"status": {}}
    shown = view(unseen)
    assert shown.why.startswith("no operator has processed this job for 1h00m: does one run?")
    early = make_view(unseen, (), (), LauncherReport(), datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC))
    assert "the operator has not processed it yet" in early.why
    foreign = job("Pending", spec_={"managedBy": "kueue.x-k8s.io/multikueue"})
    assert "spec.managedBy is kueue" in view(foreign).why


def test_a_change_of_the_spec_that_is_not_processed_yet_is_shown() -> None:
    changed = job("Running", RUNNING)
    changed["metadata"]["generation"] = 2
    assert "the operator has not processed the newest change of the spec yet" in view(changed).why


def test_only_warnings_of_pods_are_shown_and_equal_ones_once() -> None:
    events = [
        event("GRPOJob", "math", "Normal", "all is well", 10),
        event("Pod", "math-a-0", "Warning", "no room", 20),
        event("Pod", "math-b-0", "Warning", "no room", 30),
        event("Pod", "math-b-0", "Normal", "pulled", 40),
    ]
    events[1]["lastTimestamp"] = "2026-01-01T00:20:00+00:00"

    shown = view(job("Running", RUNNING), events=events).events

    assert [(e.about, e.message, e.seconds_ago) for e in shown] == [
        ("pod/math-a-0 and 1 more", "no room", 1800),
        ("", "all is well", 3000),
    ]


def test_of_a_job_of_another_release_what_is_known_is_shown() -> None:
    made = job("Running", RUNNING, futureField=1)
    made["spec"]["futureSection"] = {"on": True}
    shown = view(made)
    assert (shown.phase, shown.shapes) == ("Running", view(job("Running", RUNNING)).shapes)


def test_the_line_for_logs_changes_with_the_job() -> None:
    assert line(view(job("Running", RUNNING, progress=PROGRESS))) == "Running  step 12/40  reward 0.430"
    failed = condition("Failed", "True", "RankFailed", "rank 2 failed")
    assert line(view(job("Failed", failed))) == "Failed (RankFailed)  rank 2 failed"


def test_a_warning_about_the_last_steps_says_what_to_look_at() -> None:
    degraded = condition("Degraded", "True", "CompletionsCut", "every completion was cut")
    shown = text(view(job("Running", RUNNING, degraded)))
    assert f"CompletionsCut: every completion was cut. To do: {CURES['CompletionsCut']}" in shown
    cleared = degraded | {"status": "False"}
    assert "CompletionsCut" not in text(view(job("Running", RUNNING, cleared)))


@given(
    step=st.integers(0, 100),
    rewards=st.lists(st.none() | st.floats(allow_nan=False, width=32), max_size=80),
    message=st.text(max_size=300),
    width=st.integers(20, 200),
)
def test_every_screen_can_be_drawn(step: int, rewards: list[float | None], message: str, width: int) -> None:
    rows = [{"step": n, "reward": r} for n, r in enumerate(rewards)]
    failed = job("Running", RUNNING, lastFailure=FAILURE | {"message": message})
    shown = view(failed, progress=Progress(step=step, total_steps=100), metrics=rows)
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True).print(screen(shown))
    assert "math" in out.getvalue()


def test_every_reason_of_a_failure_and_every_obstacle_has_a_cure() -> None:
    page = (DOCS / "failures.md").read_text()
    failures = set(re.findall(r"^\| `(\w+)` \|", page.split("## Reasons of conditions")[0], re.MULTILINE))
    assert len(failures) > 15
    assert failures - CURES.keys() == set()
    assert CURES.keys() - set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set()


def test_steps_do_not_go_back_while_a_launcher_that_told_of_them_is_gone() -> None:
    told = view(job("Running", RUNNING, progress=PROGRESS), metrics=[{"step": 36, "reward": 0.5}]).training
    unknown = view(job("Running", RUNNING, progress=PROGRESS)).training
    assert (told.step, told.eta_seconds, unknown.step) == (37, 3 * 8.0, 12)
