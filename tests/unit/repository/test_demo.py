"""The demo's verdict and output: when a rise counts, what is drawn and printed, and which mistakes are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_demo import display, watch
from grpo_demo.cluster import job_name
from grpo_demo.console import DemoError, console, run
from grpo_demo.kubectl import condensed
from grpo_demo.results import MARGIN, evaluated, judge, read_rows


def rows(*rewards: float | None) -> list[dict[str, Any]]:
    return [{"step": step, "reward": reward, "rewards/accuracy/mean": reward} for step, reward in enumerate(rewards)]


def test_a_clear_rise_counts() -> None:
    verdict = judge(rows(*[0.1] * 10, *[0.5] * 10))
    assert verdict.rose
    assert "0.100 over the first 5 steps, 0.500 over the last 5: +0.400" in str(verdict)


@pytest.mark.parametrize("after", [0.0, 0.1, 0.1 + MARGIN / 2])
def test_no_rise_or_a_small_one_does_not(after: float) -> None:
    assert not judge(rows(*[0.1] * 10, *[after] * 10)).rose


def test_steps_without_a_reward_are_ignored() -> None:
    assert judge(rows(0.0, None, 0.0, 1.0, None, 1.0)) == judge(rows(0.0, 0.0, 1.0, 1.0))


def test_the_first_and_the_last_evaluation_are_told() -> None:
    found = [{"step": at, "eval/rewards/accuracy/mean": at / 100, "eval/num_prompts": 48.0} for at in (1, 12, 25)]
    assert evaluated(found) == "1% before, 25% after, of 48 that it was not trained on"
    assert evaluated(found[:1]) == ""


def test_evaluations_without_accuracy_are_told_by_their_reward() -> None:
    found = [{"eval/reward": reward, "eval/num_prompts": 48.0} for reward in (0.0833, 1.0)]
    assert evaluated(found) == "mean reward 0.08 before, mean reward 1.00 after, of 48 that it was not trained on"


def test_turns_of_an_episode_are_shown_with_their_calls() -> None:
    call = {"function": {"name": "multiply", "arguments": {"a": 3, "b": 14}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call, {"function": {"name": "", "arguments": "<tool_ca"}}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    with console.capture() as shown:
        display.completions("After", [{"prompt": "3 * 14?", "completion": turns, "reward": 1.0}])
    assert 'multiply({"a": 3, "b": 14})' in shown.get()
    assert display._said(turns) == 'multiply({"a": 3, "b": 14}) <tool_ca | 42 | It is 42.'


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="1 steps with a reward are too few"):
        judge(rows(0.5, None))


def test_an_unfinished_line_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_rows(file) == []
    file.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1, "rew')
    assert read_rows(file) == [{"step": 0}]


def test_the_curve_is_drawn_in_the_terminal_and_as_png(tmp_path: Path) -> None:
    data = rows(0.1, 0.2, None, 0.4, 0.5, 0.6)
    with console.capture() as shown:
        display.curve_in_terminal(data)
    assert len(shown.get().splitlines()) > 10
    display.curve_as_png(data, tmp_path / "out" / "reward.png", "title")
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_is_a_line_with_a_dash_for_a_missing_value() -> None:
    line = display.line({"step": 3, "reward": 0.25, "step_time": None})
    assert line.split("  ")[:3] == ["step 3", "reward 0.250", "accuracy -"]


def test_watching_ends_with_the_job(tmp_path: Path) -> None:
    def status(phase: str, *true: str) -> dict[str, Any]:
        conditions = [{"type": kind, "status": "True"} for kind in true]
        summary = {"step": "1/2", "reason": "R", "message": "M"}
        return {"status": {"phase": phase, "conditions": conditions, "summary": summary}}

    sights = iter([{}, status("Starting"), status("Failed", "Accepted", "Failed")])
    with console.capture() as shown:
        job = watch.until_finished(lambda: next(sights), tmp_path / "metrics.jsonl")
    assert watch.condition(job, "Failed")
    assert not watch.condition(job, "Complete")
    assert "phase Starting, step 1/2" in shown.get()
    assert "R: M" in shown.get()


def test_the_demo_runs_exactly_one_job(tmp_path: Path) -> None:
    manifest = tmp_path / "jobs.yaml"
    manifest.write_text("kind: GRPOJob\nmetadata: {name: a}\n---\nkind: GRPOJob\nmetadata: {name: b}\n")
    with pytest.raises(DemoError, match="holds 2 GRPOJobs"):
        job_name(manifest)
    manifest.write_text("kind: GRPOJob\nmetadata: {name: a}\nspec: {}\n")
    with pytest.raises(DemoError, match=r"name a claim in storage\.claimName"):
        job_name(manifest)


def test_a_failing_program_is_named_after_its_output() -> None:
    with console.capture() as shown, pytest.raises(DemoError, match="exit status 3"):
        run(["sh", "-c", "echo said; exit 3"])
    assert "said" in shown.get()


def test_completions_of_chats_and_texts_are_shown_once_a_prompt() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    samples = [
        {"step": 0, "prompt": chat, "completion": "two\nof [them]", "reward": 0.5},
        {"step": 0, "prompt": chat, "completion": "second", "reward": 1.0},
        {"step": 1, "prompt": "2 + 2?", "completion": "x" * 99, "reward": None},
    ]
    with console.capture() as shown:
        display.completions("Before", samples)
    assert [text for text in ("two of [them]", "1 + 1?", "…") if text not in shown.get()] == []
    assert "second" not in shown.get()


def test_descriptions_are_shown_condensed() -> None:
    kept = ["Containers:", "  trainer:", "    Image:  i", "    State:  Waiting", "Events:  none"]
    spec, mounts = ["Spec:", "  Trainer:", "    Groups:"], ["    Mounts:", "      /data from d", "      /tmp from t"]
    described = [*spec, *kept[:3], *mounts, kept[3], "Volumes:", "  data:", "    Type:  EmptyDir", kept[4]]
    assert list(condensed(described)) == kept
