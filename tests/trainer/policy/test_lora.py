"""Only adapters are trained; engines get merged weights; checkpoints hold adapters; training resumes bitwise equal."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_spec.reports import ExitCode
from support.trainer.program_errors import assert_error
from support.trainer.trainings import lines_of, make_config


@pytest.fixture(scope="module")
def untied_model(tiny_model, tmp_path_factory):
    """The tiny model with an output layer that is not tied to the embeddings."""
    folder = tmp_path_factory.mktemp("untied")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.tie_word_embeddings = False
    model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def own_name(name):
    """Name of a frozen weight in the model without adapters."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def check(result, model, adapters, whole=(), *, in_4_bits=False):
    """Check one training's result. `whole`: last parts of the names of modules that are trained whole."""
    plain = AutoModelForCausalLM.from_pretrained(model)
    names = dict(plain.named_parameters())
    if in_4_bits:
        for name, weight in result["first"].items():
            change = float((weight - names[name].detach()).norm() / names[name].detach().norm())
            assert 0.05 < change < 0.2 if "_proj" in name else change == 0, name
        plain.load_state_dict(result["first"], strict=False)
    frozen = [name for name in result["own"] if "lora_" not in name and "modules_to_save" not in name]
    assert {own_name(name) for name in frozen} == names.keys()
    for name in frozen:
        before = result["initial"][name] if in_4_bits else names[own_name(name)]
        assert result["own"][name].equal(before), f"{name} was written to"
    for name, weight in result["first"].items():
        assert weight.equal(names[name]), "adapters changed weights before the first step"

    merged = peft.PeftModel.from_pretrained(plain, adapters).merge_and_unload()
    expected = dict(merged.named_parameters())
    assert result["exported"].keys() == expected.keys()
    for name, weight in result["exported"].items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0)
        is_trained = "_proj" in name or name.rpartition(".")[0].endswith(tuple(whole))
        assert weight.equal(result["first"][name]) == (not is_trained), name
        assert not is_trained or (weight - result["first"][name]).abs().max() > 1e-4, name
    for straight, resumed in zip(*(result[key][1].items() for key in ("straight", "resumed")), strict=True):
        assert straight[0] == resumed[0]
        assert straight[1].equal(resumed[1]), straight[0]
    assert result["straight"][0] == result["resumed"][0]
    skipped, after = result["skipped"]
    assert skipped == 1
    assert all(weight.equal(after[name]) for name, weight in result["straight"][1].items())


def test_engines_get_the_weights_that_peft_would_merge_and_a_checkpoint_holds_the_adapters(
    run_program, tiny_model, untied_model, tmp_path
):
    (folder := tmp_path / "data").mkdir()
    whole = ("lm_head", "embed_tokens", "norm")
    run_program("lora_steps.py", 2, tiny_model, folder, 0.1, "0", "2", "3", "2-4bit")
    run_program("lora_steps.py", 2, untied_model, folder, 0.0, f"2:{','.join(whole)}", f"3:{','.join(whole)}")
    results = {path.stem: torch.load(path) for path in folder.glob("*.pt")}
    assert len(results) == 6
    for plan, result in results.items():
        checkpoint = folder / plan / "checkpoints" / "step-2"
        base, trained = (untied_model, whole) if ":" in plan else (tiny_model, ())
        check(result, base, checkpoint / "model", trained, in_4_bits=plan.endswith("4bit"))
        like = "2:lm_head,embed_tokens,norm" if ":" in plan else plan if plan.endswith("4bit") else "0"
        for ours, theirs in zip(result["metrics"], results[like]["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), plan
        for file in (checkpoint / "deepspeed").glob("*model_states.pt"):
            names = torch.load(file, weights_only=False)["module"]
            assert names
            assert all("lora_" in name or "modules_to_save" in name for name in names), (
                f"{plan}: frozen weights in {file.name}"
            )
        assert_error(result["refusal"], "ConfigError", r'^lora: .*\{"r": 4, "alpha": 8.0')
        if ":" not in plan:
            weights, metrics = result["began"]
            assert all(weight.equal(weights[name]) for name, weight in result["exported"].items()), plan
            # AdamW and its schedule begin anew; the loss and its gradients do not depend on them.
            for key in ("loss", "grad_norm", "kl"):
                assert metrics[key] == pytest.approx(result["straight"][0][key], rel=1e-4, abs=1e-6), plan
    first, second = results["3"]["metrics"]
    assert first["kl"] == pytest.approx(0, abs=1e-6), "the reference should be the policy without its adapters"
    assert second["kl"] > 1e-4
    assert all(
        "lora_" in name
        for name in load_file(folder / "3" / "checkpoints" / "step-2" / "model" / "adapter_model.safetensors")
    )


def test_a_run_saves_adapters_which_are_refused_as_a_model_until_they_are_merged(start_training, tiny_model, tmp_path):
    def config(model):
        settings = make_config(model, max_steps=2) | {"lora": {"r": 4, "dropout": 0.1}, "parallelism": {"zeroStage": 3}}
        return settings | {"training": settings["training"] | {"learningRate": 1e-2, "beta": 0.1, "klInReward": True}}

    ranks = start_training(config(tiny_model), 2, uid="adapters")
    assert ranks.exit_codes() == [ExitCode.DONE] * 2, ranks.logs()
    run = tmp_path / "data" / "ns" / "job" / "adapters"
    kls = [line["kl"] for line in lines_of(run / "metrics.jsonl")]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert abs(kls[1]) > 1e-6
    adapters = run / "checkpoints" / "step-2" / "model"

    ranks = start_training(config(adapters), 1, uid="refused")
    assert ranks.exit_codes() == [ExitCode.CONFIG_ERROR], ranks.logs()
    assert f"model.path: {adapters} holds adapters" in ranks.error()
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(adapters).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    initial = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert trained.keys() == initial.keys()
    assert {name for name, weight in trained.items() if not weight.equal(initial[name])} == {
        name for name in initial if "_proj" in name
    }
