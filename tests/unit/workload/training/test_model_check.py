"""A model is described by its configuration alone, and refused before weights are loaded."""

from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPTJConfig, LlamaConfig

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_workload.capacity import meta_pass
from grpo_workload.capacity import shapes as shapes_of_plan
from grpo_workload.policy.model.checkpoint_names import CheckpointNames
from grpo_workload.policy.model.load import empty_model, load_model
from grpo_workload.training import subject as subject_module
from grpo_workload.training.model_check import memory, refuse_unfit
from grpo_workload.training.model_findings import answers
from grpo_workload.training.subject import Subject
from grpo_workload.weights.export import full
from support.families import FAMILIES, LONG_ROPE, MASKED, SIZES, STATEFUL, make_config, make_model
from support.trainer.places import contract_json
from support.trainer.tiny_model import make_tiny_model
from support.trainer.tiny_vision import FAMILIES as VISION
from support.trainer.tiny_vision import make_tiny_vision
from support.trainer.tool_template import TOOL_TEMPLATE

LLAMA = LlamaConfig(**SIZES)


def make_contract(folder, model=None, **sections):
    sections["training"] = {"maxCompletionLength": 16} | sections.get("training", {})
    config = {"model": {"path": str(folder)} | (model or {})} | sections
    return Contract.model_validate(contract_json(config, gpus=2, device="cpu"))


def refuse(folder, model=None, **sections):
    """Look at what a job does when it starts."""
    refuse_unfit(Subject(make_contract(folder, model, **sections)), logs=False)


def check(folder, config, *model, **sections):
    """Look at a folder with nothing but the configuration."""
    config.save_pretrained(folder)
    refuse(folder, *model, **sections)


def shapes(model):
    """Names and shapes in checkpoints; not types, since some buffers are loaded in float32."""
    return {(spec.name, spec.shape) for group in CheckpointNames(model).group(full(model)) for spec in group.specs}


@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL, *MASKED])
@pytest.mark.parametrize("lora", [{}, {"lora": {}}], ids=["all", "lora"])
def test_families_work_without_their_weights(family, lora, tmp_path):
    model = {"attention": "eager" if family in MASKED else "varlen"}
    size = 1 if family in STATEFUL | MASKED else None
    check(tmp_path, make_config(family), model, training={"perDeviceTrainBatchSize": size}, **lora)


@pytest.mark.parametrize("lora", [{}, {"lora": {}}], ids=["all", "lora"])
def test_routers_are_found_before_anything_starts(lora, tmp_path):
    replay = {"training": {"routerReplay": True}}
    check(tmp_path, make_config("qwen3_moe"), **replay, **lora)
    with pytest.raises(ConfigError, match=r"training.routerReplay: LlamaForCausalLM is no mixture of experts"):
        check(tmp_path, LLAMA, **replay, **lora)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma3_text", "deepseek_v3", "granitemoe"])
def test_the_empty_model_has_the_checkpoint_names_and_shapes_of_the_loaded_one(family, tmp_path):
    make_model(family).to(torch.bfloat16).save_pretrained(tmp_path)
    config = make_contract(tmp_path).config
    loaded, empty = load_model(config, torch.device("cpu")), empty_model(config)
    assert shapes(empty) == shapes(loaded)
    saved = load_file(tmp_path / "model.safetensors")
    assert shapes(loaded) == {(name, tuple(tensor.shape)) for name, tensor in saved.items()}
    assert {one.device.type for one in empty.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("config", "attention", "message"),
    [
        (Gemma2Config(**SIZES), "sdpa", "sdpa ignores the attn_logit_softcapping of 50 of gemma2; use varlen or eager"),
        (
            GPTJConfig(vocab_size=9, n_embd=8, n_layer=1, n_head=1, rotary_dim=2),
            "varlen",
            ".* not have varlen; use eager",
        ),
        (make_config("gpt_oss"), "sdpa", r"\S+ does not have sdpa; use varlen or eager: GptOss.* does not support"),
        (LLAMA, "flash_attention_2", r"\S+ does not have flash_attention_2; use varlen or eager: .* installed"),
    ],
)
def test_an_attention_that_a_model_does_not_have_is_refused(config, attention, message, tmp_path):
    with pytest.raises(ConfigError, match=f"model.attention: {message}"):
        check(tmp_path, config, {"attention": attention})


TO_SERVERS = {"lora": {"push": "adapters"}, "generation": {"topology": "Server"}}
MXFP4 = LlamaConfig(quantization_config={"quant_method": "mxfp4"})


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (MXFP4, {}, r"model.path: .* quantized \(mxfp4\), which .*; use a copy with weights in b"),
        (
            make_config("falcon_h1"),
            {},
            "model: falcon_h1 has layers of the types .* training.perDeviceTrainBatchSize 1",
        ),
        (LLAMA, {"model": {"freezeVisionTower": True}}, "model.freezeVisionTower: llama has no vision tower"),
        (LLAMA, {"lora": {"targetModules": ["x_proj"]}}, "lora.targetModules: the model has no module x_proj; it has"),
        (
            make_config("qwen3_moe"),
            TO_SERVERS,
            "lora.push: adapters cannot send those of .*such as down_proj of experts",
        ),
        (
            LLAMA,
            {"generation": {"tensorParallel": 8}},
            "generation.tensorParallel: the model's 4 attention heads and 2 key and value heads .* 4 would work",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(config, settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, config, **settings)


def test_what_vllm_cannot_take_works_without_vllm(tmp_path):
    check(tmp_path, make_config("gpt_oss"), generation={"engine": "Transformers", "tensorParallel": 64})


def test_saved_adapters_must_be_of_the_model(tmp_path):
    model = peft.get_peft_model(AutoModelForCausalLM.from_config(LLAMA), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(str(tmp_path / "adapters"))
    section = {"lora": {"path": str(tmp_path / "adapters")}}
    check(tmp_path / "model", LLAMA, **section)
    with pytest.raises(ConfigError, match=r"lora.path: .*/adapters"):
        check(tmp_path / "wider", LlamaConfig(**SIZES | {"hidden_size": 256}), **section)


def test_files_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path: there is no folder .*/none in the container; is its volume"):
        refuse(tmp_path / "none")
    for content, message in (
        ("{}", "cannot load .*: Unrecognized model"),
        ('{"model_type": "of_tomorrow"}', "cannot load .* model type `of_tomorrow`"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot load .*hidden_size.*; use another model"),
        ('{"model_type": "dbrx", "attn_config": {}}', "cannot load .*: AttributeError: .*rope_theta.*; use another"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=f"model.path: {message}"):
            refuse(tmp_path)
    LoraConfig(base_model_name_or_path="org/base").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path: .* holds adapters, .*merge_and_unload\(\)"):
        refuse(tmp_path)


def found_in(folder, model=None, *, is_example=False, **sections):
    job = {"job": make_contract(folder, model, **sections)}
    return {one.aspect: one for one in answers(job, None, are_examples=is_example)["job"]}


def test_all_aspects_of_a_model_that_works(tmp_path):
    folder = make_tiny_model(tmp_path / "model", heads=4)
    found = found_in(folder, lora={"targetModules": ["q_proj", "v_proj"]})
    assert {one.verdict for one in found.values()} == {"works"}
    texts = {aspect: one.text for aspect, one in found.items()}
    assert texts["files"] == "a whole model of the type llama"
    assert texts["attention"] == "model.attention varlen, sequences packed"
    assert texts["lora"] == "0.0 million parameters in q_proj, v_proj"
    assert texts["push"] == "20 weights under the checkpoint's names"
    assert texts["tensor parallel"] == "generation.tensorParallel 1; engines can split the model over 1, 2, 4 GPUs"
    assert texts["engine"].endswith("has its own LlamaForCausalLM")
    assert texts["context"] == "prompts of up to 496 tokens, with completions of up to 16"
    too_long = found_in(folder, generation={"maxModelLen": 1024})["engine"]
    assert too_long.verdict == "refused"
    assert "refuses this model: Value error, User-specified max_model_len (1024) is greater" in too_long.text
    assert "under ZeRO-2 each of 2 GPUs holds 0.0 GiB of weights" in texts["memory"]


def test_a_job_that_cannot_fit_is_refused_with_what_would(tmp_path):
    make_config("llama").save_pretrained(tmp_path)
    large = make_contract(tmp_path, generation={"kvCacheMemory": "100Gi", "maxModelLen": 64})
    with pytest.raises(
        ConfigError, match=r"rank 0 \(job-a-0\) needs .* 100.0 GiB of KV cache.* generation.kvCacheMemory: "
    ):
        memory(Subject(large, 80 * 2**30))
    fits = make_contract(tmp_path, generation={"kvCacheMemory": "10Gi", "maxModelLen": 64})
    assert "rank 0 (job-a-0) is planned to need" in memory(Subject(fits, 80 * 2**30))


def test_a_start_makes_one_model_for_its_check_and_one_for_its_plan(tmp_path, monkeypatch):
    made: list[Any] = []

    def count(config):
        made.append(empty_model(config))
        return made[-1]

    for module in (subject_module, shapes_of_plan, meta_pass):
        monkeypatch.setattr(module, "empty_model", count)
    make_config("llama").save_pretrained(tmp_path)
    subject = Subject(make_contract(tmp_path, lora={"loadIn4Bit": True}, generation={"engine": "Transformers"}))
    refuse_unfit(subject, logs=False)
    assert len(made) == 1  # all that ranks on CPUs make, and all ranks but the first
    subject.gpu_bytes = 80 * 2**30
    assert "is planned to need" in memory(subject)
    assert len(made) == 2


def test_parameters_are_those_without_adapters_whatever_is_asked_first(tmp_path):
    make_config("llama").save_pretrained(tmp_path)
    plain = Subject(make_contract(tmp_path)).num_parameters
    assert Subject(make_contract(tmp_path, lora={})).num_parameters == plain


def test_weights_in_4_bits_are_counted_as_what_they_take(tmp_path):
    make_config("llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16).save_pretrained(tmp_path)
    without_vllm = {"engine": "Transformers"}
    plain = found_in(tmp_path, lora={}, generation=without_vllm)
    found = found_in(tmp_path, lora={"loadIn4Bit": True}, generation=without_vllm)
    assert found["lora"].text == plain["lora"].text + "; 100% of the model's own in 4 bits"
    assert "holds 1.5 GiB of weights" in plain["memory"].text
    assert "holds 0.4 GiB of weights" in found["memory"].text
    make_config("granitemoe").save_pretrained(tmp_path)
    experts = found_in(tmp_path, lora={"loadIn4Bit": True}, generation=without_vllm)
    assert "; 23% of the model's own in 4 bits" in experts["lora"].text


@pytest.mark.parametrize("family", VISION)
def test_a_vision_family_works_without_its_weights(family, tmp_path):
    folder, without_vllm = make_tiny_vision(tmp_path, family), {"engine": "Transformers"}
    found = found_in(folder, {"freezeVisionTower": True}, generation=without_vllm, lora={})
    assert {aspect for aspect, one in found.items() if one.verdict != "works"} == set()
    assert found["inputs"].text == "text and images, the vision tower frozen"
    config = make_contract(folder).config
    assert shapes(empty_model(config)) == shapes(load_model(config, torch.device("cpu")))
    refuse(folder, lora={})
    refuse(folder, {"freezeVisionTower": True}, **TO_SERVERS)
    with pytest.raises(ConfigError, match=r"lora.push: adapters does not work for a vision tower"):
        refuse(folder, **TO_SERVERS)


def test_calls_are_looked_at_in_jobs_with_tools_alone(tmp_path):
    folder, tools = make_tiny_model(tmp_path), {"tools": [{"function": "m:multiply"}]}
    assert "calls" not in found_in(folder)
    finding = found_in(folder, **tools)["calls"]
    assert finding.verdict == "refused"
    assert finding.text.startswith("model.chatTemplate: the model's chat template leaves out calls")
    with pytest.raises(ConfigError, match="leaves out calls"):
        refuse(folder, **tools)
    finding = found_in(folder, {"chatTemplate": TOOL_TEMPLATE}, **tools)["calls"]
    assert finding == ("calls", "works", "the chat template writes calls and results; the parser hermes reads calls")
    plays = {"environments": [{"name": "agent", "program": "m:play"}]}
    assert found_in(folder, **plays)["calls"].text.startswith("the chat template goes on behind a user's")
    once = {"chatTemplate": "{% if messages | length > 1 %}{{ raise_exception('once') }}{% endif %}"}
    assert "no user can reply to the model (once)" in found_in(folder, once, **plays)["calls"].text
    named = {"generation": {"toolCallParser": "hermse"}}
    finding = found_in(folder, {"chatTemplate": TOOL_TEMPLATE}, **tools, **named)["calls"]
    assert finding.text.startswith("generation.toolCallParser: vLLM has no parser 'hermse'; it has ")


def test_the_class_of_an_engine_that_transformers_builds_is_named(tmp_path):
    AutoModelForCausalLM.from_config(make_config("olmo2")).save_pretrained(tmp_path)
    assert found_in(tmp_path)["engine"].text.endswith("runs transformers' Olmo2ForCausalLM")


def test_an_example_takes_the_attention_and_the_micro_batches_that_the_model_needs(tmp_path):
    make_config("deepseek_v32").save_pretrained(tmp_path)
    needed = "model.attention eager, one sequence for each micro-batch (training.perDeviceTrainBatchSize: 1)"
    without_vllm = {"engine": "Transformers"}  # vLLM would import its class, which takes seconds
    found = found_in(tmp_path, generation=without_vllm, is_example=True)
    assert found["attention"] == ("attention", "works", needed)
    assert found["family"].verdict == "unknown"
    assert found_in(tmp_path, generation=without_vllm)["attention"].verdict == "refused"


def test_an_example_takes_the_length_at_which_rope_is_as_in_training(tmp_path):
    make_config("phi3", **LONG_ROPE).save_pretrained(tmp_path)
    without_vllm = {"engine": "Transformers"}
    found = found_in(tmp_path, generation=without_vllm, is_example=True)
    text = "longrope with the factors for short sequences, since generation.maxModelLen is at most 48"
    assert found["rope"] == ("rope", "works", text)
    assert found_in(tmp_path, generation=without_vllm)["rope"].verdict == "refused"


def test_one_cause_is_said_once(tmp_path):
    found_first = answers({"one": make_contract(tmp_path), "two": make_contract(tmp_path)}, None, are_examples=True)
    assert [(name, *(one.aspect for one in findings)) for name, findings in found_first.items()] == [("one", "files")]
    LLAMA.save_pretrained(tmp_path)
    found = found_in(tmp_path, lora={"targetModules": ["x_proj"]})
    refused = [one.aspect for one in found.values() if one.verdict == "refused"]
    assert refused == ["lora", "chat template"]  # the folder has no tokenizer


def test_nothing_of_the_check_stays(tmp_path):
    check(tmp_path, LLAMA, lora={})
    assert torch.get_default_dtype() is torch.float32
    assert nn.Linear(1, 1).weight.device.type == "cpu"
