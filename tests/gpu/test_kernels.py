"""Attention, log-probabilities and activation offload on a GPU, against PyTorch's own arithmetic."""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.logprobs import logprobs
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.logprobs.kept_words import find_kept, hide_others
from grpo_workload.policy.memory.activation_offload import Activations
from grpo_workload.policy.model import attention, attention_kernels
from grpo_workload.policy.model.logit_change import LogitChange
from support.trainer.samples import make_sample

attention.register()
LENGTHS = [(200, 900), (64, 1), (1, 700), (300, 40)]


def samples():
    random = torch.Generator().manual_seed(0)
    for index, (prompt, completion) in enumerate(LENGTHS):
        ids = torch.randint(0, 5000, (prompt + completion,), generator=random).tolist()
        yield make_sample(ids[:prompt], ids[prompt:], index=index)


def make_model(implementation, dtype, window=None):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=5000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
        attn_implementation=implementation,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to("cuda", dtype)


def logprobs_and_gradient(model, chosen, one_by_one=False, shared=()):
    head = LogprobHead(model)
    if one_by_one:
        rows = torch.cat(
            [head.per_token(model, micro_batch([sample]).to("cuda"), 1.0)[0].flatten() for sample in chosen]
        )
    else:
        batch = micro_batch(chosen, shared).to("cuda")
        rows = head.per_token(model, batch, 1.0)[0][batch.is_token_BC]
    (rows.sum() / rows.numel()).backward()
    return rows.detach(), torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("window", "longest"), [(None, None), (128, None), (None, 1)])
def test_error_of_packed_sequences_is_at_most_twice_that_of_single_sequences(
    window, longest, record_testsuite_property, monkeypatch
):
    if longest is not None:  # all sequences are long, which cuDNN takes
        monkeypatch.setattr(attention_kernels, "LONG", longest)
        calls = mock.Mock(side_effect=attention.by_cudnn)
        monkeypatch.setattr(attention, "by_cudnn", calls)
    chosen = list(samples())
    exact, exact_gradient = logprobs_and_gradient(make_model("eager", torch.float32, window), chosen, one_by_one=True)
    alone, alone_gradient = logprobs_and_gradient(make_model("sdpa", torch.bfloat16, window), chosen, one_by_one=True)
    packed, packed_gradient = logprobs_and_gradient(make_model("varlen", torch.bfloat16, window), chosen)
    errors = [(got - exact).abs().mean().item() for got in (alone, packed)]
    gradient_errors = [
        ((got - exact_gradient).norm() / exact_gradient.norm()).item() for got in (alone_gradient, packed_gradient)
    ]
    assert longest is None or calls.call_count == 4  # layers
    record_testsuite_property(
        f"errors, window {window}, cuDNN from {longest}", {"log-probs": errors, "gradients": gradient_errors}
    )
    assert errors[1] < 2 * errors[0]
    assert gradient_errors[1] < 2 * gradient_errors[0]


@pytest.mark.parametrize("window", [None, 128])
def test_error_of_a_shared_prompt_is_at_most_that_of_a_prompt_for_each_and_rounding(window, record_testsuite_property):
    """The kernel has fewer queries than keys then, and aligns their ends."""
    group, *others = samples()
    ids = group.completion.token_ids
    parts = [ids[:500], ids[500:501], ids[501:650], ids[300:900]]  # shorter and longer than the prompt and the window
    completions = [replace(group.completion, token_ids=one, logprobs=(0.0,) * len(one)) for one in parts]
    chosen = [others[0], *(replace(group, completion=one) for one in completions), others[2]]
    shared = [0, 0, 200, 200, 200, 0]
    exact, exact_gradient = logprobs_and_gradient(make_model("eager", torch.float32, window), chosen, one_by_one=True)
    errors, gradient_errors = [], []
    for layout in ((), shared):
        got, gradient = logprobs_and_gradient(make_model("varlen", torch.bfloat16, window), chosen, shared=layout)
        errors.append((got - exact).abs().mean().item())
        gradient_errors.append(((gradient - exact_gradient).norm() / exact_gradient.norm()).item())
    record_testsuite_property(f"shared errors, window {window}", {"log-probs": errors, "gradients": gradient_errors})
    assert errors[1] < 1.2 * errors[0]
    assert gradient_errors[1] < 1.2 * gradient_errors[0]


def test_a_sequence_does_not_see_its_neighbour():
    model = make_model("varlen", torch.bfloat16)
    chosen = list(samples())
    other = make_sample(range(300), chosen[3].completion.token_ids, index=9)
    with torch.no_grad():
        before, after = (
            LogprobHead(model).per_token(model, micro_batch(three).to("cuda"), 1.0)[0][:3]
            for three in (chosen, [*chosen[:3], other])
        )
    assert torch.equal(before, after)


def hidden_and_weight(dtype):
    random = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, generator=random, device="cuda").to(dtype) for shape in ((333, 256), (20_001, 256))
    )
    weight /= 16
    targets = torch.randint(0, 20_001, (333,), generator=random, device="cuda")
    return hidden.requires_grad_(), weight.requires_grad_(), targets, random


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_and_entropies_equal_those_from_whole_logits(dtype):
    hidden, weight, targets, random = hidden_and_weight(dtype)
    pull = torch.randn(333, 2, generator=random, device="cuda")
    values = logprobs.logprobs_and_entropies(hidden, weight, None, targets, 0.8, trains_entropy=True)
    gradients = torch.autograd.grad((values[:, :2] * pull).sum(), [hidden, weight])
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    whole = torch.distributions.Categorical(logits=exact_hidden @ exact_weight.T / 0.8)
    wanted = torch.stack([whole.log_prob(targets), whole.entropy()], dim=1)
    expected = torch.autograd.grad((wanted * pull).sum(), [exact_hidden, exact_weight])
    close = 2e-2 if dtype == torch.bfloat16 else 1e-3  # the logits themselves are rounded; matrix products may use TF32
    torch.testing.assert_close(values[:, 0].double(), whole.log_prob(targets), atol=close, rtol=0)
    torch.testing.assert_close(values[:, 1].double(), whole.entropy(), atol=close, rtol=0)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < (1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("truncation", [Truncation(0.8, top_k=20), Truncation(0.8, min_p=0.01, top_p=0.7)], ids=str)
def test_truncated_logprobs_are_those_of_the_kept_words(dtype, truncation):
    hidden, weight, targets, _ = hidden_and_weight(dtype)
    values = logprobs.logprobs_and_entropies(hidden, weight, None, targets, 0.8, truncation)
    gradients = torch.autograd.grad(values[:, [0, 2]].sum(), [hidden, weight])
    with torch.no_grad():
        shown = torch.zeros(333, 20_001, device="cuda")
        hide_others(shown, find_kept(hidden, weight, None, targets, truncation, LogitChange()), 0)
    kept = shown == 0
    if truncation.top_k:
        assert set(kept.sum(dim=1).tolist()) <= {20, 21}, "the first 20 and, if it is not among them, the target"
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = exact_hidden @ exact_weight.T / 0.8
    of_kept = torch.distributions.Categorical(logits=logits.masked_fill(~kept, -torch.inf)).log_prob(targets)
    of_all = torch.distributions.Categorical(logits=logits).log_prob(targets)
    expected = torch.autograd.grad((of_kept + of_all).sum(), [exact_hidden, exact_weight])
    close = 2e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(values[:, 0].double(), of_kept, atol=close, rtol=0)
    torch.testing.assert_close(values[:, 2].double(), of_all, atol=close, rtol=0)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < (1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("truncation", [None, Truncation(0.8, top_p=0.7)], ids=str)
def test_logprobs_under_penalties_are_those_of_the_cpu(truncation):
    batch = micro_batch(list(samples()))
    random = torch.Generator().manual_seed(0)
    shapes = (len(batch.targets_K), 64), (20_001, 64)
    hidden, weight = (torch.randn(*shape, generator=random) / 8 for shape in shapes)
    pull, results = torch.randn(len(hidden), 3, generator=random), []
    for device in ("cpu", "cuda"):
        own = [tensor.to(device).requires_grad_() for tensor in (hidden, weight)]
        moved = batch.to(device)
        penalised = Penalties(1.3, 0.4, 0.2).on(moved)
        values = logprobs.logprobs_and_entropies(*own, None, moved.targets_K, 0.8, truncation, penalised=penalised)
        gradients = torch.autograd.grad((values * pull.to(device)).sum(), own)
        results.append([one.detach().cpu() for one in (values, *gradients)])
    for ours, expected in zip(*results, strict=True):
        assert ((ours - expected).norm() / expected.norm()).item() < 1e-3


def test_offloaded_activations_leave_the_device_and_give_the_same_gradient():
    model = make_model("varlen", torch.bfloat16)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    head, activations = LogprobHead(model), Activations(torch.device("cuda"))
    batch = micro_batch(list(samples()) * 8).to("cuda")

    def gradient(context):
        model.zero_grad()
        with context:
            rows = head.per_token(model, batch, 1.0)[0]
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        rows.sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), held

    plain, held = gradient(nullcontext())
    for _ in range(3):  # later steps reuse the memory of the first
        moved, left = gradient(activations.offloaded())
        # Not bitwise equal: kernels add up in an order that differs between calls.
        assert (moved - plain).float().norm() < 0.01 * plain.float().norm()
    layer_inputs = 4 * batch.num_tokens * 512 * 2
    assert held - left > 0.7 * layer_inputs
