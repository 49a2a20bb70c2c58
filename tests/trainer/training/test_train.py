"""Real ranks: a stopped run resumes exactly where it was; users' mistakes end with their exit code and message."""

import json
import shutil
import signal

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_spec.reports import ExitCode, Progress
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.storage.journal import read_lineage
from support.trainer.object_storage import BUCKET
from support.trainer.trainings import HUB_NAME, lines_of, make_config


class Hub:
    """The offline cache of a hub with two commits of one model: the tiny model, and the same with larger weights."""

    def __init__(self, model, folder):
        self.env = {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}
        entry = folder / f"models--{HUB_NAME.replace('/', '--')}"
        for commit in "12":
            shutil.copytree(model, entry / "snapshots" / (commit * 40))
        changed = entry / "snapshots" / ("2" * 40) / "model.safetensors"
        save_file({name: weight * 1.5 for name, weight in load_file(changed).items()}, changed, {"format": "pt"})
        (entry / "refs").mkdir()
        self._branch = entry / "refs" / "main"
        self.move_to("1")

    def move_to(self, commit):
        """Move the branch to the commit of this digit."""
        self._branch.write_text(commit * 40)


EVALUATION = {
    "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
    "everySteps": 3,
    "maxPrompts": 5,
    "numGenerations": 2,
    "temperature": 0.7,
}


def curve(run_dir):
    timed = ("time", "tokens_per_second", "step_time", "ranks", "eval/")
    lines = lines_of(run_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def progress_of(ranks):
    """Return the progress that rank 0 has reported."""
    return Progress.model_validate_json((ranks.state(0) / "progress.json").read_text())


@pytest.mark.parametrize(
    ("engine", "source"), [("Transformers", "folder"), pytest.param("vLLM", "hub", marks=pytest.mark.vllm)]
)
def test_a_stopped_run_resumes_as_if_it_had_never_stopped(
    start_training, tiny_model, object_storage, tmp_path, engine, source
):
    stopped, hub = tmp_path / "data" / "ns" / "job" / "stopped", Hub(tiny_model, tmp_path / "hub")
    hub.env |= object_storage.env
    model = HUB_NAME if source == "hub" else tiny_model
    offload = {"parallelism": {"offloadOptimizer": "generating" if source == "folder" else "none"}}
    prompts = 3 if source == "folder" else 1  # one: rank 1 has no prompt, and trains on samples of rank 0
    together, times = (2, 2) if source == "folder" else (1, 1)  # steps that share a generation, and how often

    def config(max_steps, evaluates=True):
        made = make_config(model, max_steps=max_steps, engine=engine) | offload
        made |= {"evaluation": EVALUATION} if evaluates else {}
        made["training"] |= {"promptsPerStep": prompts, "stepsPerGeneration": together, "numIterations": times}
        if source == "folder":  # every fourth or so group has equal rewards
            made["training"] |= {"numGenerations": 2, "maxResampleTimes": 2}
            made["storage"]["export"] = {
                "everySteps": together * times,
                "keep": 2,
                "uploadTo": f"s3://{BUCKET}/train",
            }
        return made

    ranks = start_training(config(100_000), 2, uid="stopped", **hub.env)
    metrics = stopped / "metrics.jsonl"
    ranks.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    ranks.processes[1].send_signal(signal.SIGTERM)
    assert ranks.exit_codes() == [ExitCode.STOPPED] * 2, ranks.logs()
    step = len(curve(stopped))
    assert step % (together * times) == 0, "it stopped inside a generation"
    assert {path.name for path in (stopped / "checkpoints").iterdir()} == {f"step-{step}", *best(stopped)}
    progress = progress_of(ranks)
    assert (progress.step, progress.checkpoint) == (step, f"ns/job/stopped/checkpoints/step-{step}")

    # A rank that is killed after a checkpoint leaves lines of later steps.
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step, "reward": 9.0}) + "\n")
    hub.move_to("2")
    resumed = start_training(config(step + 2), 2, uid="stopped", **hub.env)
    assert resumed.exit_codes() == [ExitCode.DONE] * 2, resumed.logs()
    hub.move_to("1")
    straight = start_training(config(step + 2, evaluates=False), 2, uid="straight", **hub.env)
    assert straight.exit_codes() == [ExitCode.DONE] * 2, straight.logs()

    expected = curve(straight_dir := tmp_path / "data" / "ns" / "job" / "straight")
    assert [line["step"] for line in expected] == list(range(step + 2))
    for ours, line in zip(curve(stopped), expected, strict=True):
        assert ours == pytest.approx(line, rel=1e-5, abs=1e-6)
    assert all(line["grad_norm"] > 0 for line in expected)
    assert max(line["trained/sampling/sampling_logp_difference/max"] for line in expected) < 1e-4
    first = [line for line in expected if line["step"] % (together * times) == 0]
    assert max(line["clip_ratio/region_mean"] for line in first) == 0
    assert [line["rewards/even/begun"] for line in first] == [line["step"] for line in first]
    assert len({line["rewards/even/drawn"] for line in first}) == len(first), "the processes are seeded by step"
    assert (max(line["clip_ratio/region_mean"] for line in expected) > 0) == (together * times > 1)
    versions = [{group.weight_versions.pop() for group in groups} for groups in read_lineage(stopped)]
    assert versions[: 2 * together] == [{0}] * together + [{together * times}] * together
    assert (sum(line.get("resampling/groups", 0) for line in expected) > 0) == (source == "folder")
    weights, expected_weights = (
        load_file(folder / "checkpoints" / f"step-{step + 2}" / "model" / "model.safetensors")
        for folder in (stopped, straight_dir)
    )
    assert all(weight.equal(weights[name]) for name, weight in expected_weights.items())
    kept = {path.name for path in (stopped / "checkpoints").glob("*step-*")}
    assert kept == {f"step-{step + 2}", *best(stopped)}, "storage.keep is 1"
    if source == "folder":
        exports = {path.name: ModelCard.load(path / "README.md") for path in (stopped / "exports").iterdir()}
        assert exports.keys() == {f"step-{step}", f"step-{step + 2}"}, "storage.export.keep is 2"
        uploads = object_storage.bucket / "train" / "ns" / "job" / "stopped"
        for file in stopped.glob("exports/*/*"):
            assert (uploads / file.parent.name / file.name).read_bytes() == file.read_bytes(), file
        results = {one.metric_type: one.metric_value for one in exports[f"step-{step + 2}"].data.eval_results}
        last = lines_of(stopped / "evaluations.jsonl")[-1]
        assert results["eval/reward"] == pytest.approx(last["eval/reward"])
    logged = EventAccumulator(str(stopped / "tensorboard")).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in logged] == [
        (line["step"] + 1, pytest.approx(line["reward"])) for line in curve(stopped)
    ]
    ranks = lines_of(stopped / "ranks.jsonl")
    assert [line["step"] for line in ranks] == list(range(step + 2))
    for line, whole in zip(ranks, curve(stopped), strict=True):
        assert [rank["rank"] for rank in line["ranks"]] == [0, 1]
        for rank in line["ranks"][: prompts if line["step"] % (together * times) == 0 else 0]:
            assert rank["seconds"]["generate"] > 0 < rank["generated_tokens_per_second"]
        assert all(rank["trained_tokens"] > 0 for rank in line["ranks"])
        fed, trained = (sum(rank[name] for rank in line["ranks"]) for name in ("fed_tokens", "trained_tokens"))
        assert 0 <= whole["padding_fraction"] == pytest.approx((fed - trained) / fed)
    totals = [
        sum(rank["sample_tokens"] for line in ranks[: at + 1] for rank in line["ranks"]) for at in range(step + 2)
    ]
    assert totals == [line["num_tokens"] for line in curve(stopped)]
    last = lines_of(metrics)[-1]
    assert 0 < last.get("time/offload", 0) < last["time/train"] if source == "folder" else "time/offload" not in last
    completions = lines_of(stopped / "completions.jsonl")
    assert {line["step"] for line in completions} == set(range(step + 2))
    assert all(1 <= line["extra"]["even"]["length"] <= 6 for line in completions)
    check_evaluations(stopped, max_steps=step + 2, length=together * times)
    if source == "folder":
        check_early_stop(start_training, config(100_000), tmp_path, hub.env)


def best(run_dir):
    """Return the name of the checkpoint of the best evaluation; nothing if that was made before the first step."""
    lines = lines_of(run_dir / "evaluations.jsonl")
    step = max(lines, key=lambda line: line["eval/reward"])["step"]
    return {f"step-{step}"} if step else set()


def check_early_stop(start_training, config, tmp_path, env):
    """It ends with a checkpoint after two evaluations whose metric is as before."""
    config["evaluation"] = EVALUATION | {"metricForBestModel": "eval/num_prompts", "earlyStoppingPatience": 2}
    ranks = start_training(config, 1, uid="early", **env)
    assert ranks.exit_codes() == [ExitCode.DONE], ranks.logs()
    progress = progress_of(ranks)
    assert (progress.step, progress.checkpoint_step, progress.phase) == (8, 8, "Done")
    folder = tmp_path / "data" / progress.export.path
    assert (folder.parent.name, folder.name) == ("exports", "step-8")
    assert progress.export.bytes == sum(path.stat().st_size for path in folder.iterdir())
    said = progress.evaluation
    assert (said.step, said.best_step, said.value, said.stops) == (8, 0, 5.0, True)


def check_evaluations(run_dir, *, max_steps, length):
    """Each was made once, also where the run stopped; nothing else of the run differs from one without (`curve`)."""
    lines = lines_of(run_dir / "evaluations.jsonl")
    due = [step for step in range(length, max_steps, length) if step // 3 > (step - length) // 3]
    assert [line["step"] for line in lines] == [0, *due, max_steps]
    assert {line["eval/num_prompts"] for line in lines} == {5}
    assert all(line["eval/rewards/even/best@2"] >= line["eval/rewards/even/mean"] for line in lines)
    assert lines[0]["eval/rewards/even/mean"] != lines[-1]["eval/rewards/even/mean"], "it samples with new weights"
    metrics = lines_of(run_dir / "metrics.jsonl")
    found = {line["step"] + 1: line["eval/reward"] for line in metrics if "eval/reward" in line}
    assert set(found) <= {line["step"] for line in lines}
    assert all(found.get(line["step"], line["eval/reward"]) == line["eval/reward"] for line in lines)
    logged = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("eval/reward")
    assert [event.step for event in logged] == [line["step"] for line in lines]


def test_steps_that_are_not_finite_are_reported_and_end_the_run_with_its_weights_saved(
    start_training, tiny_model, tmp_path
):
    config = make_config(tiny_model, max_steps=9)
    config["rewards"][0] |= {"function": "token_reward:huge"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{index} + 1?"}) + "\n" for index in range(10)))
    config["dataset"] = {"path": str(rows)}
    config["training"] |= {"scaleRewards": "none", "maxSkippedSteps": 1}
    ranks = start_training(config, 1)
    assert ranks.exit_codes() == [ExitCode.NOT_FINITE], ranks.logs()
    run_dir = tmp_path / "data/ns/job/uid"
    assert "NotFiniteError: 2 steps in a row had no effect" in ranks.error()
    assert "training.maxSkippedSteps is 1" in ranks.error()
    assert [(line["skipped"], line["skipped_steps"]) for line in curve(run_dir)] == [(1, 1), (1, 2)]
    assert [warning.reason for warning in progress_of(ranks).warnings] == ["NotFinite"]
    saved = load_file(run_dir / "checkpoints" / "step-2" / "model" / "model.safetensors")
    assert all(weight.equal(saved[name]) for name, weight in load_file(tiny_model / "model.safetensors").items())

    config["training"]["maxSteps"] = 2
    same = start_training(config, 1)
    assert same.exit_codes() == [ExitCode.DONE], same.logs()
    check_other_rows(start_training, config, tmp_path, rows)


def check_other_rows(start_training, config, tmp_path, rows):
    """An attempt that finds other rows than the run began with is a mistake; a job that continues it takes them."""
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:7]))
    config["training"]["maxSteps"] = 3
    again = start_training(config, 1)
    config["storage"]["resumeFrom"] = "ns/job/uid"
    other = start_training(config, 1, uid="other")
    assert again.exit_codes() == [ExitCode.CONFIG_ERROR], again.logs()
    changed = f"dataset.path: {rows} has changed since the run began: 7 rows instead of 10, fingerprint "
    assert changed in again.error()
    assert "create a job with storage.resumeFrom: ns/job/uid" in again.error()
    assert other.exit_codes() == [ExitCode.DONE], other.logs()
    saved = tmp_path / "data" / "ns" / "job" / "other" / "checkpoints" / "step-3" / "trainer.json"
    data = json.loads(saved.read_text())["data"]["dataset"]
    assert (data["rows"], data["first_step"]) == (7, 2), "their order begins with their first"


def test_a_row_that_preprocess_cannot_use_is_a_config_error_on_all_ranks_at_its_step(
    start_training, tiny_model, tmp_path
):
    rows = [{"question": f"{index} + 1?"} for index in range(9)]
    at_step_2_on_rank_1 = PromptSource(rows, lambda index, row: None, seed=42).draw(2, 2, 3).index
    rows[at_step_2_on_rank_1]["question"] = "spoilt"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"path": str(tmp_path / "rows.jsonl"), "preprocess": "user_rows:spoils", "dataloaderNumWorkers": 1}
    config = make_config(tiny_model, max_steps=6) | {"dataset": dataset}
    config["training"]["loss"] = "user_losses:ppo"
    ranks = start_training(config, 2)
    assert ranks.exit_codes() == [ExitCode.CONFIG_ERROR] * 2, ranks.logs()
    for rank in range(2):
        said = f"user_rows:spoils of row {at_step_2_on_rank_1} raised ValueError: this one is spoilt"
        assert f"dataset.preprocess: {said}" in ranks.error(rank)
    run_dir = tmp_path / "data" / "ns" / "job" / "uid"
    assert [(line["step"], line["loss/distance"]) for line in curve(run_dir)] == [(0, 0.0), (1, 0.0)]
    assert lines_of(run_dir / "completions.jsonl")[0]["prompt"].startswith("Please: ")
