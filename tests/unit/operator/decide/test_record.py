"""Records of a pass: outcomes as soon as they are seen, progress not too often, nothing new if nothing changed. Plans
that change the course of a job are made again from a live read; others are not.
"""

from dataclasses import replace

from grpo_operator.api.names import Condition
from grpo_operator.api.times import after, rfc3339
from grpo_operator.decide.conditions import holds
from grpo_operator.decide.plan import Mode
from grpo_operator.decide.second_look import News, changes_course, news
from grpo_spec.reports import EvaluationProgress, ExitCode, ExportProgress, Outcome, Progress, RunWarning
from support.control_plane.jobs import NOW, ended, pod, pod_as_read
from support.control_plane.passes import SERVER, A, B, Case, all_ready, failed


def test_outcomes_are_recorded_when_first_seen_and_outlive_the_pod() -> None:
    case = Case()
    case.see(pod(A, outcome=ended(0)), pod(B, ready=True))
    two = case.see(pod(A, uid="another"), pod(B, outcome=ended(0)))
    assert holds(two.status, Condition.COMPLETE)
    assert two.mode == Mode.STOPPED


def test_a_message_that_fills_the_report_of_a_pod_leaves_its_last_step_and_what_was_shown_of_it() -> None:
    case, pods = all_ready()
    metrics = {f"rewards/{number}/mean": 0.123456 for number in range(100)}
    tried, warned = (
        EvaluationProgress(step=30, metric="reward", value=0.5),
        RunWarning(reason="ZeroGradient", message="m"),
    )
    said = Progress(step=31, total_steps=99, reward=0.5, metrics=metrics, warnings=(warned,), evaluation=tried)
    case.see(*pods, at=5, progress=said)
    saved = {"checkpoint": "step-30", "checkpoint_step": 30, "export": ExportProgress(path="e/step-30", bytes=7)}
    last = said.model_copy(update={"step": 33} | saved)
    message = "rank 0 failed with exit code 1: " + "é" * 4000
    outcome = Outcome(attempt=0, exit_code=ExitCode.RANK_FAILED, reason="RankFailed", message=message, progress=last)
    terminated = {"exitCode": 70, "message": outcome.to_message(), "finishedAt": rfc3339(NOW)}
    assert len(terminated["message"].encode()) <= 4096
    died = pod_as_read(A, {"state": {"terminated": terminated}})
    for at in (6, 7, 30):
        case.see(died, pods[1], at=at)
        assert (case.status.last_failure.step, case.status.progress.step, case.status.progress.reward) == (33, 33, 0.5)
        assert case.status.progress.time == after(NOW, 6), "nothing new to write"
    assert (case.status.checkpoint, case.status.evaluation.value) == ("step-30", 0.5)
    assert (case.status.export.path, case.status.export.bytes) == ("e/step-30", 7)
    assert holds(case.status, Condition.DEGRADED)


def test_an_export_is_recorded_although_no_step_follows_it_and_outlives_the_attempt() -> None:
    case, pods = all_ready()
    last = Progress(step=9, total_steps=9)
    assert case.see(*pods, progress=last).status.export is None
    exported = last.model_copy(update={"export": ExportProgress(path="team/job/uid/exports/step-9", bytes=270)})
    assert case.see(*pods, progress=exported, at=20).status.export.path == "team/job/uid/exports/step-9"
    assert case.see(*pods, progress=last, at=40).status.export.bytes == 270


def at(step: int, *reasons: str) -> Progress:
    """Return what rank 0 reports after a step, with a warning for each reason."""
    warnings = tuple(RunWarning(reason=reason, message=f"{reason} at {step}") for reason in reasons)
    more = {"reward": 0.123456, "advice": f"advice after {step} steps", "checkpoint": f"step-{step}"}
    return Progress(step=step, total_steps=40, warnings=warnings, **more)


def test_progress_is_written_on_a_new_step_and_not_too_often() -> None:
    case, pods = all_ready()
    assert case.see(*pods, progress=at(1)).status.summary.step == "1/40"
    assert case.see(*pods, progress=at(2), at=9).status.progress.step == 1
    later = case.see(*pods, progress=at(2), at=10).status
    assert (later.progress.step, later.progress.reward) == (2, 0.1235)
    assert later.progress.advice == "advice after 2 steps"
    assert case.see(*pods, at=3600).status.progress == later.progress


def test_a_warning_of_rank_0_becomes_a_condition_and_one_event_and_outlives_the_job() -> None:
    case, pods = all_ready()
    said = []
    for number, reasons in enumerate([(), ("CompletionsCut",), ("CompletionsCut", "ZeroGradient"), (), ("NotFinite",)]):
        events = case.see(*pods, progress=at(number, *reasons), at=20 * number).events
        said.append([(event.type, event.reason) for event in events])
        assert holds(case.status, Condition.DEGRADED) == bool(reasons)
    assert said == [[], [("Warning", "CompletionsCut")], [], [], [("Warning", "NotFinite")]]
    case.see(*(pod(name, uid=f"{name}-0", outcome=ended(0)) for name in (A, B)), at=100)
    assert holds(case.status, Condition.COMPLETE)
    assert case.message(Condition.DEGRADED) == "NotFinite at 4"


def test_progress_may_be_written_later_but_not_the_first_and_not_a_warning() -> None:
    case, pods = all_ready()
    running = case.status
    first = case.see(*pods, progress=at(1)).status
    second = case.see(*pods, progress=at(2), at=20).status
    assert (news(running, first), news(first, second)) == (News.URGENT, News.PROGRESS)
    warned = case.see(*pods, progress=at(3, "NotFinite"), at=40).status
    still = case.see(*pods, progress=at(4, "NotFinite"), at=60).status
    assert (news(second, warned), news(warned, still)) == (News.URGENT, News.PROGRESS)
    other = case.see(*pods, progress=at(5, "CompletionsCut"), at=80).status
    assert (news(still, other), news(other, case.see(*pods, progress=at(6), at=99).status)) == (News.URGENT,) * 2
    assert news(first, case.see(pod(A, outcome=ended(1)), pods[1], progress=at(9), at=120).status) == News.URGENT


def test_only_what_ends_or_begins_an_attempt_or_deletes_is_looked_at_again() -> None:
    case, pods = all_ready()
    before = case.status
    assert not changes_course(before, case.see(*pods, at=60, progress=Progress(step=3, total_steps=9)))
    assert news(before, case.status) is News.URGENT, "its first progress"
    assert not changes_course(before, case.see(replace(pods[0], ready=False), *pods[1:], at=70)), "details of pods"
    assert changes_course(before, case.see(failed(A, at=80), *pods[1:], at=80))


def test_evaluations_are_shown_and_say_why_the_training_ended_early() -> None:
    def evaluated(step: int, stops: bool = False) -> Progress:
        said = EvaluationProgress(
            step=step, metric="eval/reward", value=0.5, best_step=0, best=0.7123456789, stops=stops
        )
        return Progress(step=7, total_steps=40, evaluation=said)

    case, pods = all_ready()
    status = case.see(*pods, progress=evaluated(0)).status
    assert status.summary.best == "0.712@0"
    assert (status.evaluation.best_metric, status.evaluation.value) == (0.712346, 0.5)
    assert case.see(*pods, progress=evaluated(7, stops=True), at=20).status.evaluation.step == 7, "the step is the same"
    case.see(*(pod(name, uid=f"{name}-0", outcome=ended(0)) for name in (A, B)), at=100)
    assert "finished after 7 steps, because eval/reward was best after step 0" in case.message(Condition.COMPLETE)


def test_a_second_pass_over_the_same_facts_changes_nothing() -> None:
    case, pods = all_ready()
    once = case.see(*pods).status
    again = case.see(*pods, at=18_000)
    assert again.status == once
    assert not again.events


def test_an_engine_pod_that_is_already_replaced_is_accepted() -> None:
    case, pods = all_ready(**SERVER, failurePolicy={"onGenerationFailure": "RestartGeneration"})
    replaced = [pod(one.name, uid="new") if one.name == "job-gen-0" else one for one in pods]
    case.see(*replaced)
    case.see(*replaced)
    assert (case.status.attempt, case.status.phase) == (0, "Starting")
    assert {m.pod: (m.uid, m.replacing) for m in case.status.members}["job-gen-0"] == ("new", False)
