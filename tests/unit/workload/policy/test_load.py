"""What cannot be trained is refused when it is loaded, fused norms compute the same, and training has no noise."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPTJConfig, LlamaConfig, PreTrainedConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from grpo_workload.policy.load import fuse_norms, load_model, remove_noise
from grpo_workload.spec.contract import Device
from grpo_workload.spec.errors import ConfigError
from grpo_workload.spec.trainer import TrainerConfig
from support.families import SIZES, make_model


def load(folder: Path, config: PreTrainedConfig, **model: str) -> Any:
    config.save_pretrained(folder)
    fields = {"dataset": {"name": "d"}, "rewards": [{"name": "r", "accuracy": {}}]}
    return load_model(TrainerConfig.model_validate(fields | {"model": {"path": str(folder)} | model}), Device.CPU)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(
        ConfigError, match=r"model.path: .* quantized \(mxfp4\), which .*; use a copy with weights in b"
    ):
        load(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "attention", "cure"),
    [
        (Gemma2Config(**SIZES), "sdpa", "sdpa ignores the attn_logit_softcapping of 50 of gemma2; use varlen or eager"),
        (GPTJConfig(vocab_size=9, n_embd=8, n_layer=1, n_head=1, rotary_dim=2), "varlen", "does not have varlen; use"),
    ],
)
def test_an_attention_that_a_family_lacks_is_refused(
    config: PreTrainedConfig, attention: str, cure: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"model.attention: .*{cure}"):
        load(tmp_path, config, attention=attention)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_a_fused_norm_computes_the_same_forward_and_backward(kind: type[nn.Module]) -> None:
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


def test_a_copy_of_a_fused_norm_has_its_own_weight() -> None:
    model = nn.Sequential(LlamaRMSNorm(8))
    fuse_norms(model)
    second = copy.deepcopy(model)
    nn.init.zeros_(second[0].weight)
    assert second(torch.ones(1, 8)).abs().sum() == 0
    assert model(torch.ones(1, 8)).abs().sum() > 0


def test_other_norms_are_not_replaced() -> None:
    model = nn.Sequential(GemmaRMSNorm(64), nn.LayerNorm(64))
    before = [module.forward for module in model]
    assert fuse_norms(model) == 0
    assert [module.forward for module in model] == before


@pytest.mark.parametrize("family", ["seed_oss", "starcoder2", "mixtral"])
def test_training_has_no_noise_that_engines_do_not_have(family: str) -> None:
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
