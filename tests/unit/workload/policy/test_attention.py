"""Attention in blocks and padded computes the same; unsupported models and arguments are refused."""

import pytest
import torch
from transformers import DeepseekV4Config, Gemma2Config

from grpo_spec.errors import ConfigError
from grpo_workload.policy.model import attention, attention_blocks, attention_kernels
from support.families import make_config, make_model

attention.register()
BOUNDS = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3}


def test_missing_bounds_raise_instead_of_mixing_sequences():
    model = make_model("llama")
    model.set_attn_implementation("varlen")
    with pytest.raises(ValueError, match="without cu_seq_lens_q and max_length_q"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize(
    ("asked", "cure"),
    [
        ({"position_bias": torch.zeros(2)}, "use eager and training.perDeviceTrainBatchSize 1"),
        ({"indices": torch.zeros(2)}, "use eager and training.perDeviceTrainBatchSize 1"),
        ({"dropout": 0.1}, "use a copy of the model whose config.json sets it to 0"),
    ],
)
def test_unsupported_arguments_raise(asked, cure):
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ConfigError, match=rf"model.attention: varlen does not support .* asks; {cure}$"):
        attention.attend(torch.nn.Identity(), query, query, query, None, **BOUNDS, **asked)


def test_a_window_that_a_layer_does_not_pass_on_is_not_ignored():
    layer, query = torch.nn.Identity(), torch.zeros(1, 2, 3, 8)
    layer.config, layer.layer_idx = make_config("mistral", layer_types=["full_attention", "sliding_attention"]), 1
    attention.attend(layer, query, query, query, None, **BOUNDS, sliding_window=2)
    with pytest.raises(ConfigError, match="varlen does not support a sliding window that only the mask tells"):
        attention.attend(layer, query, query, query, None, **BOUNDS)


@pytest.mark.parametrize("rows", [4, 7, 64])
@pytest.mark.parametrize("window", [None, 3])
def test_blocks_of_any_size_compute_the_same(rows, window, monkeypatch):
    """Against the arithmetic of single sequences. Caps, sinks and gradients: test_families.py."""
    monkeypatch.setattr(attention_blocks, "ROWS", rows)
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 21, 8, generator=random) for heads in (4, 2, 2))
    bounds = {"cu_seq_lens_q": torch.tensor([0, 9, 10, 21], dtype=torch.int32), "max_length_q": 11}
    expected, _ = attention.attend(torch.nn.Identity(), query, key, value, None, sliding_window=window, **bounds)
    no_sinks = torch.full((4,), -torch.inf)
    layer = torch.nn.Identity()
    output, _ = attention.attend(layer, query, key, value, None, sliding_window=window, s_aux=no_sinks, **bounds)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)


def test_a_cap_that_transformers_sdpa_would_leave_out_is_refused():
    attention.check_softcap(Gemma2Config(), "varlen")
    attention.check_softcap(make_config("llama"), "sdpa")
    with pytest.raises(ConfigError, match=r"model.attention: sdpa ignores the attn_logit_softcapping of 50 of gemma2"):
        attention.check_softcap(Gemma2Config(), "sdpa")


ALONE = "training.perDeviceTrainBatchSize 1"
COMPRESSED = "compressed_sparse_attention, heavily_compressed_attention"


@pytest.mark.parametrize(
    ("config", "implementation", "packs", "cure"),
    [
        (make_config("qwen3_next"), "varlen", True, f"linear_attention, which need {ALONE}: "),
        (make_config("qwen3_next"), "eager", True, f"linear_attention, which need {ALONE}: "),
        (
            make_config("llama4_text"),
            "varlen",
            True,
            f"chunked_attention, which need model.attention eager and {ALONE}: ",
        ),
        (make_config("llama4_text"), "varlen", False, "chunked_attention, which need model.attention eager: "),
        (DeepseekV4Config(), "varlen", False, f"{COMPRESSED}, which need model.attention eager: "),
    ],
)
def test_models_whose_layers_mix_or_cut_packed_sequences_are_refused(config, implementation, packs, cure):
    with pytest.raises(ConfigError, match=f"model: {config.model_type} has layers of the types {cure}"):
        attention.check_layers(config, implementation, packs=packs)


def test_what_that_refusal_advises_is_not_refused():
    """It computes what transformers does: test_families.py."""
    attention.check_layers(make_config("mistral"), "varlen", packs=True)
    attention.check_layers(make_config("qwen3_next"), "varlen", packs=False)
    attention.check_layers(make_config("llama4_text"), "eager", packs=False)


def test_what_samples_with_a_cache_is_an_attention_that_computes_the_same():
    kinds = {family: attention.cached(make_model(family)) for family in ("llama", "gemma2", "gpt_oss")}
    assert kinds == {"llama": "sdpa", "gemma2": "eager", "gpt_oss": "eager"}, "sdpa has neither soft caps nor sinks"


def test_sequences_that_are_padded_give_the_same_attention_and_gradients():
    """As cuDNN gets them."""
    starts = torch.tensor([0, 3, 16, 17], dtype=torch.int32)
    bounds = attention_kernels.Bounds(starts, 13)
    torch.manual_seed(0)
    found = []
    inputs = [torch.randn(17, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    for multiple in (1, 8):
        output = attention_kernels.one_by_one(*inputs, bounds, bounds, None, None, multiple)
        found.append([output, *torch.autograd.grad((output**2).sum(), inputs)])
    for plain, padded in zip(*found, strict=True):
        assert plain.shape == padded.shape
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-6)
