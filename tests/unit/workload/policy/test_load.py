"""Fused norms compute the same, and training has no noise."""

import copy
import os

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from grpo_spec.errors import ConfigError
from grpo_workload.policy.adapters.lora import add_adapters
from grpo_workload.policy.model.load import apply_fitting, fuse_norms, load_model, remove_noise
from support.families import make_config, make_model
from support.trainer.places import config_of

LOSSES = {"cross_entropy", "fused_linear_cross_entropy"}


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_a_fused_norm_computes_the_same_forward_and_backward(kind):
    plain = kind(64, eps=1e-5)
    nn.init.normal_(plain.weight)
    model = nn.Sequential(copy.deepcopy(plain))
    assert fuse_norms(model) == 1
    hidden = torch.randn(2, 5, 64)
    results = []
    for norm in (plain, model):
        given = hidden.clone().requires_grad_()
        norm(given).square().sum().backward()
        results.append((norm(hidden), given.grad, next(norm.parameters()).grad))
    torch.testing.assert_close(results[0], results[1])


def test_a_copy_of_a_fused_norm_has_its_own_weight():
    model = nn.Sequential(LlamaRMSNorm(8))
    fuse_norms(model)
    second = copy.deepcopy(model)
    nn.init.zeros_(second[0].weight)
    assert second(torch.ones(1, 8)).abs().sum() == 0
    assert model(torch.ones(1, 8)).abs().sum() > 0


def test_other_norms_are_not_replaced():
    model = nn.Sequential(GemmaRMSNorm(64), nn.LayerNorm(64))
    before = [module.forward for module in model]
    assert fuse_norms(model) == 0
    assert [module.forward for module in model] == before


def test_weights_that_are_broken_or_of_another_shape_end_the_job(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    config = config_of(model={"path": str(tmp_path)})
    make_config("llama", num_key_value_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path: the weights in \S+ do not have the shapes"):
        load_model(config, torch.device("cpu"))
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(ConfigError, match=r"model.path: cannot load \S+: .*header"):
        load_model(config, torch.device("cpu"))


def replaced_by_liger(family, **fields):
    """Return what is asked of Liger."""
    asked: dict[str, bool] = {}
    apply_fitting(lambda _, **kernels: asked.update(kernels), make_model(family, **fields), rms_norm=False)
    assert not any(asked.pop(name) for name in LOSSES)
    return asked


def test_kernels_that_do_not_fit_a_model_are_left_out(caplog):
    usual = {"rms_norm": False, "geglu": False}
    without = usual | {"swiglu": False}
    assert replaced_by_liger("llama") == usual
    assert replaced_by_liger("llama", hidden_act="gelu") == without
    assert replaced_by_liger("gemma2") == {"rms_norm": False, "swiglu": False}
    for family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        assert replaced_by_liger(family) == without
    for dense in ({"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}):
        assert replaced_by_liger("qwen3_moe", **dense) == without
    assert not caplog.messages


def test_kernels_that_liger_fails_to_put_in_are_named_and_the_model_trains_without(caplog):
    def patch(model, **_kernels):
        model.model.layers[0].mlp.experts  # noqa: B018  # as Liger's, where it expects experts in every layer

    apply_fitting(patch, make_model("llama"), rms_norm=False)
    (message,) = caplog.messages
    assert "'LlamaMLP' object has no attribute 'experts'" in message


@pytest.mark.parametrize("family", ["seed_oss", "starcoder2", "mixtral"])
def test_training_has_no_noise_that_engines_do_not_have(family):
    model = make_model(family, attention_dropout=0.5)
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.5
    ids = torch.arange(20).unsqueeze(0)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    remove_noise(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.config.attention_dropout == 0.5


def test_routers_choose_in_training_as_in_evaluation():
    model = make_model("phimoe")
    remove_noise(model)
    ids = torch.arange(20).unsqueeze(0)
    expected = model.eval()(ids).logits
    assert torch.equal(model.train()(ids).logits, expected)
    assert torch.equal(copy.deepcopy(model).train()(ids).logits, expected)


def test_what_takes_no_part_in_training_on_text_is_frozen_and_has_no_adapters(tmp_path):
    make_model("gemma3", whole=True).save_pretrained(tmp_path)
    fields = {"model": {"path": str(tmp_path)}}
    model = load_model(config_of(**fields), torch.device("cpu"))
    parts = {name: name.startswith(("model.language_model.", "lm_head.")) for name, _ in model.named_parameters()}
    assert {name: one.requires_grad for name, one in model.named_parameters()} == parts
    assert set(parts.values()) == {True, False}
    assert add_adapters(model, config_of(**fields, lora={})) is not None
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert trained
    assert all(name.startswith("model.language_model.") for name in trained)
