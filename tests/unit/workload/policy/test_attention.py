"""Packed sequences compute the same as each sequence alone; unsupported models and arguments are refused."""

from copy import deepcopy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    Gemma2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model import attention, attention_blocks, attention_kernels
from support import families

attention.register()
SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BOUNDS = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "sliding window": MistralConfig(**SHAPE, sliding_window=4),
}


def samples():
    random = torch.Generator().manual_seed(0)
    for index, (prompt, completion) in enumerate([(3, 9), (6, 1), (1, 5)]):
        ids = torch.randint(0, 60, (prompt + completion,), generator=random).tolist()
        answer = Completion(
            token_ids=tuple(ids[prompt:]), logprobs=(0.0,) * completion, text="", finish_reason="stop", weight_version=0
        )
        yield Sample(
            prompt=Prompt(index=index, text="", token_ids=tuple(ids[:prompt])),
            completion=answer,
            reward=1.0,
            advantage=1.0,
        )


def make_model(name, implementation):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), attn_implementation=implementation)


def logprobs_of(model, chosen):
    return LogprobHead(model).per_token(model, micro_batch(chosen), 1.0)[0]


def alone(model, sample):
    """Log-probabilities of one sample, from the model's own logits."""
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.completion.token_ids]])
    first = len(sample.prompt.token_ids)
    logits = model(input_ids=ids).logits[0, first - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, first:].unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("implementation", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_compute_the_same_as_each_alone(name, implementation):
    plain, packed = make_model(name, "eager"), make_model(name, implementation)
    rows = logprobs_of(packed, list(samples()))
    rows.sum().backward()
    for row, sample in zip(rows, samples(), strict=True):
        expected = alone(plain, sample)
        expected.sum().backward()
        torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=0)
        assert not row[len(expected) :].any()
    for ours, theirs in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sequence_does_not_see_its_neighbour(name):
    model = make_model(name, "varlen")
    first, second, third = samples()
    other = micro_batch([third]).input_ids_1N.flip(1).flatten().tolist()
    changed = Sample(
        prompt=Prompt(index=9, text="", token_ids=tuple(other)), completion=third.completion, reward=1.0, advantage=1.0
    )
    assert torch.equal(logprobs_of(model, [first, second, third])[:2], logprobs_of(model, [first, second, changed])[:2])


def test_missing_bounds_raise_instead_of_mixing_sequences():
    with pytest.raises(ValueError, match="without cu_seq_lens_q and max_length_q"):
        make_model("llama", "varlen")(input_ids=torch.tensor([[1, 2, 3]]))


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
    layer.config, layer.layer_idx = MistralConfig(**SHAPE, layer_types=["full_attention", "sliding_attention"]), 1
    attention.attend(layer, query, query, query, None, **BOUNDS, sliding_window=2)
    with pytest.raises(ConfigError, match="varlen does not support a sliding window that only the mask tells"):
        attention.attend(layer, query, query, query, None, **BOUNDS)


def test_values_may_have_a_smaller_head_size_than_keys():
    """As in latent attention (MLA). The kernel for GPUs: tests/gpu/test_kernels.py."""
    query, value = torch.rand(1, 2, 3, 24), torch.rand(1, 2, 3, 16)
    output, _ = attention.attend(torch.nn.Identity(), query, query, value, None, **BOUNDS)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True)
    torch.testing.assert_close(output, expected.transpose(1, 2))


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
    attention.check_softcap(CONFIGS["llama"], "sdpa")
    with pytest.raises(ConfigError, match=r"model.attention: sdpa ignores the attn_logit_softcapping of 50 of gemma2"):
        attention.check_softcap(Gemma2Config(), "sdpa")


@pytest.mark.parametrize(
    ("config", "implementation", "packs", "cure"),
    [
        (Qwen3NextConfig(), "varlen", True, "linear_attention, which need training.perDeviceTrainBatchSize 1: "),
        (Qwen3NextConfig(), "eager", True, "linear_attention, which need training.perDeviceTrainBatchSize 1: "),
        (
            Llama4TextConfig(),
            "varlen",
            True,
            "chunked_attention, which need model.attention eager and training.perDeviceTrainBatchSize 1: ",
        ),
        (Llama4TextConfig(), "varlen", False, "chunked_attention, which need model.attention eager: "),
        (
            DeepseekV4Config(),
            "varlen",
            False,
            "compressed_sparse_attention, heavily_compressed_attention, which need model.attention eager: ",
        ),
    ],
)
def test_models_whose_layers_mix_or_cut_packed_sequences_are_refused(config, implementation, packs, cure):
    with pytest.raises(ConfigError, match=f"model: {config.model_type} has layers of the types {cure}"):
        attention.check_layers(config, implementation, packs=packs)


def test_what_that_refusal_advises_is_not_refused():
    """It computes what transformers does: test_families.py."""
    attention.check_layers(CONFIGS["sliding window"], "varlen", packs=True)
    attention.check_layers(Qwen3NextConfig(), "varlen", packs=False)
    attention.check_layers(Llama4TextConfig(), "eager", packs=False)


def test_what_samples_with_a_cache_is_an_attention_that_computes_the_same():
    kinds = {family: attention.cached(families.make_model(family)) for family in ("llama", "gemma2", "gpt_oss")}
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
