"""Adapters of experts, and the model's own weights in 4 bits: engines get just what is trained.

What they would not get is refused, and transformers rounds weights to the same.
"""

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_spec.errors import ConfigError
from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters import adapter_weights, lora
from grpo_workload.policy.adapters.adapter_weights import total_experts
from grpo_workload.policy.adapters.four_bit import quantize
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.policy.model.checkpoint_names import CheckpointNames, save_config
from grpo_workload.storage.model_files import ModelFiles
from grpo_workload.weights.export import Export
from support.families import make_model
from support.trainer.places import config_of
from support.trainer.tiny_vision import make_tiny_vision

IDS_BT = torch.arange(12).view(2, 6)


def config(**fields):
    return LoraConfig.model_validate({"r": 3, "alpha": 12, **fields})


def change(adapters):
    for parameter in adapters.trained():
        parameter.data += torch.randn_like(parameter) / 8


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss"])
def test_adapters_of_experts_are_merged(family, tmp_path):
    model, plain = make_model(family), make_model(family)
    adapters = Adapters(model, config(), seed=1)
    change(adapters)
    names = CheckpointNames(model)
    weights = dict(Export(adapters.pushed(), is_partitioned=False))
    untouched = plain.load_state_dict(weights, strict=False)
    assert untouched.unexpected_keys == []
    initial = make_model(family).eval()(IDS_BT).logits
    trained = model.eval()(IDS_BT).logits
    torch.testing.assert_close(plain.eval()(IDS_BT).logits, trained, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(initial, trained, atol=1e-2)

    exported = dict(Export(adapters.pushed(), is_partitioned=False, group=names.group))
    plain.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.allclose(exported[name], tensor, atol=1e-6) for name, tensor in saved.items())


def test_stored_transposed_or_not_each_expert_gets_its_own_product():
    base, a_KI, b_OK = torch.randn(3, 5, 4), torch.randn(6, 4), torch.randn(5, 6)
    expected = torch.stack([base[e] + 0.5 * b_OK[:, e::3] @ a_KI[2 * e : 2 * e + 2] for e in range(3)])
    torch.testing.assert_close(total_experts(base, a_KI, b_OK, scale=0.5, is_transposed=False), expected)
    torch.testing.assert_close(total_experts(base.mT, a_KI, b_OK, scale=0.5, is_transposed=True), expected.mT)


def test_what_engines_would_not_get_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"lora.push: adapters cannot send those of parameters, such as .*push merged"):
        Adapters(make_model("qwen3_moe"), config(push="adapters"), seed=1)
    merged = adapter_weights.merged
    monkeypatch.setattr(lora, "merged", lambda model: merged(model)[:2])
    with pytest.raises(ValueError, match=r"lora\.targetModules: .*lora_A.* cannot be sent to engines"):
        Adapters(make_model("llama"), config(), seed=1)


CPU = torch.device("cpu")


def in_4_bits(model, **fields):
    """Put the model's weights into 4 bits, and adapters that change it."""
    quantize(model, config(loadIn4Bit=True, **fields), CPU)
    adapters = Adapters(model, config(loadIn4Bit=True, **fields), seed=1)
    torch.manual_seed(2)
    change(adapters)
    return adapters


def layers_in_4_bits(model):
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
    quantize(seeing := AutoModelForImageTextToText.from_pretrained(folder), config(loadIn4Bit=True), CPU)
    assert {path.split(".")[1] for path in layers_in_4_bits(seeing)} == {"language_model"}
    with pytest.raises(ConfigError, match=r"lora.loadIn4Bit: a gpt2 has no linear layers that can be in 4 bits"):
        quantize(make_model("gpt2"), config(loadIn4Bit=True), CPU)


def test_a_pass_in_evaluation_mode_changes_neither_weights_nor_gradients():
    def gradients(*, evaluates):
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
