"""Adapters of experts: merged, they compute what is trained; what engines would not get is refused."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters import adapter_weights, lora
from grpo_workload.policy.adapters.adapter_weights import total_experts
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.policy.model.checkpoint_names import CheckpointNames
from grpo_workload.weights.export import Export
from support.families import make_model

IDS_BT = torch.arange(12).view(2, 6)


def config(**fields: Any) -> LoraConfig:
    return LoraConfig.model_validate({"r": 3, "alpha": 12, **fields})


def change(adapters: Adapters) -> None:
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
    with pytest.raises(
        ValueError, match=r"lora\.push: adapters cannot send those of parameters, such as .*push merged"
    ):
        Adapters(make_model("qwen3_moe"), config(push="adapters"), seed=1)
    merged = adapter_weights.merged
    monkeypatch.setattr(lora, "merged", lambda model: merged(model)[:2])
    with pytest.raises(ValueError, match=r"lora\.targetModules: .*lora_A.* cannot be sent to engines"):
        Adapters(make_model("llama"), config(), seed=1)
