"""Tiny vision-language models are trained on images that the test makes, in every topology."""

import shutil

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_spec.contract import Contract
from grpo_spec.reports import ExitCode
from support.trainer.colours import LEARNT, make_job, make_rows
from support.trainer.engines import Engines, make_contract, with_ranks
from support.trainer.tiny_vision import make_tiny_vision
from support.trainer.trainings import lines_of

pytestmark = pytest.mark.vllm


def job_of(model, rows, max_steps):
    made = make_job(model, "float32", rows, maxSteps=max_steps, perDeviceTrainBatchSize=8)
    return made | {"storage": {"checkpointEverySteps": 2, "keep": 100}}


def check_saved(run_dir, step, model, family):
    """Weights of the tower have changed, and transformers loads the model with its processor."""
    saved = run_dir / "checkpoints" / f"step-{step}" / "model"
    weights, initial = (load_file(folder / "model.safetensors") for folder in (saved, model))
    assert weights.keys() == initial.keys()
    tower = [name for name in weights if "vision_tower" in name or "visual" in name]
    changed = {name for name in tower if not weights[name].equal(initial[name])}
    assert len(changed) > len(tower) / 2
    assert AutoProcessor.from_pretrained(saved).image_processor.to_dict() == (
        AutoProcessor.from_pretrained(model).image_processor.to_dict()
    )
    assert AutoModelForImageTextToText.from_pretrained(saved).config.model_type == family


def test_a_model_learns_to_tell_colours_and_resumes_from_the_journal(start_training, tmp_path):
    model, rows = make_tiny_vision(tmp_path / "model", "qwen2_5_vl"), make_rows(tmp_path / "rows")
    run_dir = tmp_path / "data" / "ns" / "job" / "uid"
    zero_3 = {"parallelism": {"zeroStage": 3}}
    ranks = start_training(job_of(model, rows, 4) | zero_3, 2)
    assert ranks.exit_codes() == [ExitCode.DONE] * 2, ranks.logs()
    before = lines_of(run_dir / "metrics.jsonl")
    shutil.rmtree(run_dir / "checkpoints" / "step-4")  # as if the ranks had been killed before they wrote it
    ranks = start_training(job_of(model, rows, 20) | zero_3, 2)
    assert ranks.exit_codes() == [ExitCode.DONE] * 2, ranks.logs()
    after = lines_of(run_dir / "metrics.jsonl")
    assert (before[2]["tokens_per_second"] > 0, after[2]["ranks/generated_tokens_per_second/max"]) == (True, 0), "known"
    for name in ("reward", "loss", "grad_norm", "trained/entropy"):
        assert [line[name] for line in after[:4]] == pytest.approx([line[name] for line in before], rel=1e-5, abs=1e-6)
    assert max(line["trained/sampling/sampling_logp_difference/max"] for line in after) < 1e-4
    assert sum(line["reward"] for line in after[-4:]) / 4 > LEARNT
    check_saved(run_dir, 20, model, "qwen2_5_vl")


def in_the_trainers_pod(contract, ranks):
    """Return another job in NodeLocal, which has the same engine."""
    values = with_ranks(contract, ranks).model_dump(mode="json", by_alias=True)
    values["job"]["uid"] = "node-local"
    values["config"]["generation"]["topology"] = "NodeLocal"
    values["engines"][0] |= {name: values["members"][0][name] for name in ("pod", "group")}
    return Contract.model_validate(values)


def test_engines_get_images_over_http_and_the_weights_of_the_tower(start_ranks, tmp_path):
    """First on a pod of their own; then next to two ranks, of which the first pushes weights for the second, too."""
    model, rows = make_tiny_vision(tmp_path / "model", "internvl"), make_rows(tmp_path / "rows")
    contract = make_contract(model, [(1, 1)])
    job = job_of(model, rows, 3)
    job["generation"] |= {"topology": "Server"}
    values = contract.model_dump(mode="json", by_alias=True) | {"config": job, "durable": True}
    (tmp_path / "engines").mkdir()
    engines = Engines(tmp_path / "engines", Contract.model_validate(values))
    with engines.running():
        for one, ranks in ((engines.contract, 1), (in_the_trainers_pod(engines.contract, 2), 2)):
            (path := tmp_path / f"{one.job.uid}.json").write_text(one.model_dump_json(by_alias=True))
            env = {"GRPO_CONTRACT": str(path), "GRPO_DATA_DIR": str(tmp_path / "data")}
            done = start_ranks(["-m", "grpo_workload.rank"], ranks, f"train-{one.job.uid}", **env)
            assert done.exit_codes() == [ExitCode.DONE] * ranks, done.logs()
    for one in (engines.contract.job.uid, "node-local"):
        run_dir = tmp_path / "data" / "ns" / "job" / one
        steps = lines_of(run_dir / "metrics.jsonl")
        assert len(steps) == 3
        assert max(line["trained/sampling/sampling_logp_difference/max"] for line in steps) < 1e-4
        assert all(line["grad_norm"] > 0 for line in steps)
        check_saved(run_dir, 3, model, "internvl")
