"""RunReport keeps one completion per prompt, and reports the median duration of the last steps, and advice."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_spec.reports import EvaluationProgress
from grpo_workload.algorithm.samples import Completion, Episode, Fork, Prompt, Sample
from grpo_workload.reporting.jsonl import read_evaluations
from grpo_workload.reporting.progress_files import read_progress
from grpo_workload.reporting.run_report import RunReport
from grpo_workload.reporting.transcript import HEAD, LOST_PER_STEP, TAIL, readable

STEP = {"reward": 0.5, "step_time": 1.0, "tokens_per_second": 2.0}


def _lines(folder: Path, name: str = "completions") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()]


def _sample(prompt: int, answer: str) -> Sample:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), text=answer, finish_reason="stop", weight_version=0)
    return Sample(
        prompt=Prompt(index=prompt, text=f"prompt {prompt}", token_ids=(1,)),
        completion=completion,
        reward=0.5,
        advantage=0.25,
        extra={"judge": {"why": answer}} if prompt == 7 else {},
    )


def test_one_completion_of_each_prompt_is_kept(tmp_path: Path) -> None:
    report = RunReport(tmp_path / "run", tmp_path, total_steps=2, step=0)
    samples = [_sample(prompt, f"answer {prompt}.{number}") for prompt in (7, 3) for number in range(3)]
    report.step(0, STEP, samples, [])
    report.close()
    kept = _lines(tmp_path)
    assert [line["completion"] for line in kept] == ["answer 7.0", "answer 3.0"]
    assert [line["advantage"] for line in kept] == [0.25, 0.25]
    assert [line.get("extra") for line in kept] == [{"judge": {"why": "answer 7.0"}}, None]
    assert json.loads((tmp_path / "progress.json").read_text())["step"] == 1


def test_an_episode_is_kept_as_a_transcript_after_what_its_environment_showed(tmp_path: Path) -> None:
    turns = (
        {"role": "assistant", "content": "look", "tool_calls": []},
        {"role": "tool", "content": "a" * HEAD + "b" * 1234 + "c" * TAIL},
        {"role": "assistant", "content": "d" * 9999},
    )
    sample = _sample(1, "last turn")
    lost = Episode(lost="process", failure="it ended", retries=2)
    counts = {"num_turns": 2, "num_calls": 2, "num_failed_calls": 1, "retries": 1}
    seconds = {"call_seconds": 1.2345, "wait_seconds": 0.5}
    episode = Episode(messages=turns, observation=" A wall.", context=((3, 5),), **counts, **seconds)
    sample = replace(
        sample,
        prompt=replace(sample.prompt, text=[{"role": "user", "content": "Play."}]),
        completion=replace(sample.completion, token_ids=tuple(range(9)), finish_reason="length", episode=episode),
    )
    none = [replace(sample, reward=math.nan, completion=replace(sample.completion, token_ids=(), episode=lost))] * 3
    report = RunReport(tmp_path / "run", tmp_path, total_steps=2, step=0)
    report.step(0, STEP, [*none, sample], [])
    report.close()
    line, *rest = _lines(tmp_path)
    assert line["prompt"] == [{"role": "user", "content": "Play. A wall."}]
    assert [line["completion"][0], line["completion"][2]] == [turns[0], turns[2]], "the model's turns are whole"
    left_out = " [... 1,234 characters, which the journal has ...] "
    assert line["completion"][1] == {"role": "tool", "content": "a" * HEAD + left_out + "c" * TAIL}
    told = {"turns": 2, "calls": 2, "failed_calls": 1, "call_seconds": 1.234, "wait_seconds": 0.5, "retries": 1}
    assert line["episode"] == told | {"is_truncated": True, "tokens": [3, 2, 4]}
    assert len(rest) == LOST_PER_STEP
    assert rest[0]["episode"] == {"lost": "process", "failure": "it ended", "retries": 2}
    assert (rest[0]["completion"], rest[0]["reward"]) == ([], None)


def test_a_transcript_of_an_episode_that_forked_is_of_its_last_sequence() -> None:
    fork = Fork(prompt_ids=(1,), token_ids=(2, 3), logprobs=(-1.0, -1.0), context=())
    said = ({"role": "assistant", "content": "Yes."},)
    episode = Episode(messages=said, asked=({"role": "user", "content": "In short?"},), num_turns=2, forks=(fork,))
    sample = _sample(0, "Yes.")
    both = (
        replace(sample.completion, token_ids=(5, 6), logprobs=(-1.0,) * 2, episode=one)
        for one in (episode, replace(episode, context=((0, 1),)))
    )
    lines = [next(readable([replace(sample, completion=completion)])) for completion in both]
    assert [line["prompt"] for line in lines] == [[{"role": "user", "content": "In short?"}]] * 2
    assert [line["completion"] for line in lines] == [[*said]] * 2
    assert [line["episode"]["sequences"] for line in lines] == [2, 2]
    assert [line["episode"].get("tokens") for line in lines] == [[2], None], "of messages that are another sequence's"


def test_an_evaluation_has_a_line_of_its_own_and_is_in_that_of_its_step(tmp_path: Path) -> None:
    said = EvaluationProgress(step=2, metric="eval/reward", value=0.5)
    report = RunReport(tmp_path / "run", tmp_path, total_steps=9, step=0)
    report.evaluated(0, {"eval/reward": 0.25, "time/evaluate": 1.0}, said)
    for step in range(3):
        if step == 1:
            report.evaluated(2, {"eval/reward": math.nan, "time/evaluate": 1.0}, said)
        report.step(step, STEP, [], [])
    report.evaluated(3, {"eval/reward": 0.75, "time/evaluate": 1.0}, said)
    report.close()
    assert [line["step"] for line in _lines(tmp_path, "metrics") if "eval/reward" in line] == [1]
    found = read_evaluations(tmp_path / "run", 2)
    assert list(found) == [0, 2]
    assert found[0] == {"eval/reward": 0.25, "time/evaluate": 1.0}
    assert math.isnan(found[2]["eval/reward"])
    RunReport(tmp_path / "run", tmp_path, total_steps=9, step=2).close()
    assert list(read_evaluations(tmp_path / "run", 9)) == [0, 2], "later ones are made again from the checkpoint"


def test_the_median_duration_of_the_last_20_steps_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    report = RunReport(tmp_path / "run", tmp_path, total_steps=30, step=0)
    # The first step compiles; the others take longer and longer.
    for step, seconds in enumerate([60, *range(1, 24)]):
        now += seconds
        advice = f"advice after {step + 1} steps"
        report.step(step, STEP, [], [], advice=advice)
    report.close()
    progress = read_progress(tmp_path)
    assert progress is not None
    assert progress.step_seconds == 13.5  # the last 20 took 4 to 23 s
    assert progress.advice == "advice after 24 steps"


def test_where_steps_share_a_generation_its_sampling_is_part_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a generation would look like a hang, and the time that is left too short."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    report = RunReport(tmp_path / "run", tmp_path, total_steps=30, step=0, steps_per_push=4)
    for step in range(12):
        now += 1 if step % 4 else 21
        report.step(step, STEP, [], [])
        if step == 3:
            report.pushed(4)
    report.close()
    progress = read_progress(tmp_path)
    assert progress is not None
    assert (progress.step_seconds, progress.weight_version) == (6, 4)
