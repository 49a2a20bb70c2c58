"""The model's own weights in 4 bits: engines get just what is trained, and transformers rounds weights to the same."""

from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_spec.errors import ConfigError
from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters.four_bit import quantize
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.policy.model.checkpoint_names import CheckpointNames, save_config
from grpo_workload.storage.model_files import ModelFiles
from grpo_workload.weights.export import Export
from support.families import make_model
from support.trainer.places import config_of
from support.trainer.tiny_vision import make_tiny_vision

CPU = torch.device("cpu")
IDS_BT = torch.arange(12).view(2, 6)


def config(**fields: Any) -> LoraConfig:
    return LoraConfig.model_validate({"r": 3, "alpha": 12, "loadIn4Bit": True, **fields})


def in_4_bits(model: Any, **fields: Any) -> Adapters:
    """Put the model's weights into 4 bits, and adapters that change it."""
    quantize(model, config(**fields), CPU)
    adapters = Adapters(model, config(**fields), seed=1)
    torch.manual_seed(2)
    for parameter in adapters.trained():
        parameter.data += torch.randn_like(parameter) / 8
    return adapters


def layers_in_4_bits(model: Any) -> set[str]:
    return {path.removesuffix(".base_layer") for path, one in model.named_modules() if isinstance(one, Linear4bit)}


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("llama", torch.float32, 1e-5),
        ("llama", torch.bfloat16, 0.02),
        ("qwen3_moe", torch.float32, 1e-5),
        ("deepseek_v3", torch.float32, 1e-5),
    ],
)
def test_engines_and_exports_get_what_is_trained(family, dtype, tolerance, tmp_path):
    model, initial = make_model(family).to(dtype), make_model(family).to(dtype).eval()
    # Not all layers in 4 bits have adapters: engines have loaded none of their rounded values.
    adapters = in_4_bits(model, targetModules=["o_proj"])
    export = Export(adapters.pushed(), is_partitioned=False, group=CheckpointNames(model).group)
    weights = {name: weight.clone() for name, weight in export}
    assert [(spec.shape, spec.dtype) for spec in export.specs] == [(tuple(w.shape), dtype) for w in weights.values()]
    save_config(model, tmp_path)
    files = ModelFiles(export.specs, rank=0, world_size=1)
    for name, weight in weights.items():
        files.put(tmp_path, name, weight)
    files.close(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    torch.testing.assert_close(exported(IDS_BT).logits, model.eval()(IDS_BT).logits, atol=tolerance, rtol=tolerance)
    assert not torch.allclose(exported(IDS_BT).logits, initial(IDS_BT).logits, atol=2 * tolerance)
    before = initial.state_dict()
    changed = {name for name, weight in exported.state_dict().items() if not weight.equal(before[name])}
    assert changed == {f"{path}.weight" for path in layers_in_4_bits(model)}


def test_only_layers_that_nothing_else_reads_or_trains_are_in_4_bits(tmp_path):
    adapters = in_4_bits(model := make_model("llama"), modulesToSave=["lm_head", "embed_tokens", "layers.1.mlp"])
    own = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
    mlp = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    expected = {f"model.layers.0.{name}" for name in own | mlp} | {f"model.layers.1.{name}" for name in own}
    assert layers_in_4_bits(model) == expected
    assert all(parameter.is_floating_point() for parameter in adapters.trained())

    in_4_bits(hybrid := make_model("falcon_h1"))
    assert not {path for path in layers_in_4_bits(hybrid) if path.endswith("out_proj")}, "a fused kernel reads these"
    folder = make_tiny_vision(tmp_path, "qwen3_vl")
    quantize(seeing := AutoModelForImageTextToText.from_pretrained(folder), config(), CPU)
    assert {path.split(".")[1] for path in layers_in_4_bits(seeing)} == {"language_model"}
    with pytest.raises(ConfigError, match=r"lora.loadIn4Bit: a gpt2 has no linear layers that can be in 4 bits"):
        quantize(make_model("gpt2"), config(), CPU)


def test_a_pass_in_evaluation_mode_changes_neither_weights_nor_gradients():
    def gradients(*, evaluates: bool) -> list[torch.Tensor]:
        adapters = in_4_bits(model := make_model("llama").to(torch.bfloat16))
        if evaluates:
            with torch.no_grad():
                model.eval()(IDS_BT)
        model.train()(IDS_BT).logits.float().logsumexp(-1).sum().backward()
        return [parameter.grad for parameter in adapters.trained()]

    for plain, after in zip(gradients(evaluates=False), gradients(evaluates=True), strict=True):
        assert plain.equal(after)
        assert plain.any()


def test_checkpoints_hold_no_constants_of_blocks():
    in_4_bits(model := make_model("llama"))
    assert model.state_dict().keys() == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("lora", "as_loaded"), [(None, True), ({}, True), ({"path": "/data/sft"}, False), ({"loadIn4Bit": True}, False)]
)
def test_the_first_push_is_compared_with_what_engines_loaded_only_where_it_is_that(lora, as_loaded):
    assert config_of(lora=lora).begins_as_loaded == as_loaded
