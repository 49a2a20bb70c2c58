"""Log-probabilities, entropies and gradients by slices of the vocabulary equal those from whole logits."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from grpo_workload.policy import logprobs
from grpo_workload.policy.logprobs import LogprobHead, logprobs_and_entropies


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(logprobs, "WORDS", 100)


def expected(hidden, weight, bias, targets, temperature):
    return torch.distributions.Categorical(
        logits=torch.nn.functional.linear(hidden, weight, bias) / (temperature or 1.0)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_equal_those_from_whole_logits(temperature, has_bias):
    random = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=random).requires_grad_() for shape in ((7, 16), (257, 16), (257,))
    )
    targets, pull = torch.randint(0, 257, (7,), generator=random), torch.randn(7, generator=random)
    parameters = [hidden, weight, *([bias] if has_bias else [])]
    whole = expected(hidden, weight, bias if has_bias else None, targets, temperature)
    gradients = torch.autograd.grad((whole.log_prob(targets) * pull).sum(), parameters)

    values = logprobs_and_entropies(hidden, weight, bias if has_bias else None, targets, temperature)
    torch.testing.assert_close(values[:, 0], whole.log_prob(targets), atol=1e-5, rtol=0)
    torch.testing.assert_close(values[:, 1], whole.entropy(), atol=1e-5, rtol=0)
    for ours, theirs in zip(torch.autograd.grad((values[:, 0] * pull).sum(), parameters), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_half_precision_is_added_up_in_float32():
    random = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(9, 64, generator=random).bfloat16(), torch.randn(1000, 64, generator=random).bfloat16()
    targets = torch.randint(0, 1000, (9,), generator=random)
    values = logprobs_and_entropies(hidden, weight, None, targets, 1.0)
    assert values.dtype == torch.float32
    whole = torch.distributions.Categorical(logits=(hidden @ weight.T).float())
    torch.testing.assert_close(values[:, 0], whole.log_prob(targets), atol=1e-5, rtol=0)


def test_frozen_weights_get_no_gradient():
    hidden, weight = torch.randn(2, 4, requires_grad=True), torch.randn(6, 4)
    logprobs_and_entropies(hidden, weight, None, torch.tensor([0, 5]), 1.0)[:, 0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("is_tied", [True, False])
def test_gradients_of_a_model_with_tied_or_untied_output_layer(is_tied):
    torch.manual_seed(0)
    shape = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=is_tied))
    ids, places = torch.randint(0, 259, (1, 12)), torch.tensor([2, 3, 7])
    targets = ids[0, places + 1]
    whole = model(input_ids=ids).logits[0, places].log_softmax(-1).gather(1, targets.unsqueeze(1)).sum()
    gradients = torch.autograd.grad(whole, list(model.parameters()))

    head = LogprobHead(model)
    with head.targets(places, targets, 1.0):
        values = model(input_ids=ids).logits
    assert values.shape == (3, 2)
    for ours, theirs in zip(torch.autograd.grad(values[:, 0].sum(), list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert model(input_ids=ids).logits.shape == (1, 12, 259), "outside `targets` the model returns logits"


def test_models_that_change_their_logits_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="model: gpt2 changes its logits by final_logit_softcapping"):
        LogprobHead(model)


KERNELS = """
import torch
from grpo_workload.policy import logprobs, logprobs_triton
logprobs_triton.BLOCK = 64
torch.manual_seed(0)
state, plain_state = (torch.zeros(4, 5) for _ in range(2))
state[0] = plain_state[0] = -torch.inf
whole, targets = 3 * torch.randn(5, 250), torch.tensor([0, 99, 100, 249, 130])
for start in (0, 100, 200):
    part = whole[:, start : start + 100].contiguous()
    logprobs_triton.fold(part, targets - start, 0.7, state)
    logprobs._fold(part, targets - start, 0.7, plain_state)
torch.testing.assert_close(state, plain_state, atol=1e-4, rtol=1e-5)
lse, gradient = state[0] + state[1].log(), torch.randn(5)
for start in (0, 100, 200):
    ours, plain = whole[:, start : start + 100].clone(), whole[:, start : start + 100].clone()
    logprobs_triton.unfold(ours, targets - start, lse, gradient, 0.7)
    logprobs._unfold(plain, targets - start, lse, gradient, 0.7)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
"""


def test_the_triton_kernels_compute_the_same():
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNELS], check=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
