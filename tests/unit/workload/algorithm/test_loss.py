"""grpo_loss adds up over any split into micro-batches and ranks, ignores masked tokens, and clips and counts ratios."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_workload.algorithm.loss import LossScale, grpo_loss, token_means

LOSS_TYPES = ["grpo", "dapo", "dr_grpo"]


def make_batch(seed, num_sequences=7, num_tokens=5):
    """Random float64 tensors; some sequences are short, and the first is masked completely."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, num_tokens + 1, (num_sequences,), generator=generator)
    mask = (torch.arange(num_tokens) < lengths.unsqueeze(1)).double()
    mask[0] = 0
    logprobs = -rand(num_sequences, num_tokens).abs()
    noise = 0.5 * rand(num_sequences, num_tokens)
    return logprobs, logprobs + noise, rand(num_sequences), mask, logprobs - 0.3 * noise


def loss_of(batch, rows, scale, loss_type, beta):
    logprobs, old, advantages, mask, ref = (tensor[rows] for tensor in batch)
    options = {"loss_type": loss_type, "epsilon": 0.2, "epsilon_high": 0.28, "beta": beta, "max_completion_length": 5}
    return grpo_loss(logprobs, old, advantages, mask, scale=scale, ref_logprobs_BT=ref if beta else None, **options)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    owner=st.lists(st.integers(0, 5), min_size=7, max_size=7),
    loss_type=st.sampled_from(LOSS_TYPES),
    beta=st.sampled_from([0.0, 0.04]),
)
def test_any_split_into_micro_batches_and_ranks_adds_up_to_the_whole(seed, owner, loss_type, beta):
    whole, parts = make_batch(seed), make_batch(seed)
    scale = LossScale(num_sequences=7, num_tokens=int(whole[3].sum()))
    whole[0].requires_grad_()
    parts[0].requires_grad_()

    expected = loss_of(whole, slice(None), scale, loss_type, beta)
    outputs = [loss_of(parts, torch.tensor(owner) == place, scale, loss_type, beta) for place in set(owner)]
    expected.loss.backward()
    for output in outputs:
        output.loss.backward()

    assert sum(output.loss.item() for output in outputs) == pytest.approx(expected.loss.item(), abs=1e-6)
    assert torch.allclose(parts[0].grad, whole[0].grad, atol=1e-6)
    for name, total in expected.metrics.items():
        assert sum(output.metrics[name].item() for output in outputs) == pytest.approx(total.item(), abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_masked_completely_gives_loss_0_and_gradients_0(loss_type):
    logprobs = torch.zeros(1, 3, requires_grad=True)
    garbage = torch.full((1, 3), -math.inf)
    output = grpo_loss(
        logprobs,
        garbage,
        torch.tensor([1.0]),
        torch.zeros(1, 3),
        scale=LossScale(num_sequences=4, num_tokens=0),
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=None,
        beta=0.1,
        max_completion_length=3,
        ref_logprobs_BT=garbage,
        entropy_BT=garbage,
    )
    output.loss.backward()
    assert output.loss.item() == 0
    assert logprobs.grad.tolist() == [[0, 0, 0]]
    assert all(value.item() == 0 for value in output.metrics.values())


def test_clipped_tokens_get_no_gradient_and_are_counted():
    ratios = torch.tensor([[0.5, 1.0, 1.25, 2.0]] * 2)
    logprobs = ratios.log().requires_grad_()
    output = grpo_loss(
        logprobs,
        torch.zeros(2, 4),
        torch.tensor([1.0, -1.0]),
        torch.ones(2, 4),
        scale=LossScale(num_sequences=2, num_tokens=8),
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.3,
        beta=0.0,
        max_completion_length=4,
    )
    output.loss.backward()
    assert (logprobs.grad == 0).tolist() == [[False, False, False, True], [True, False, False, False]]
    means = token_means({name: value.item() for name, value in output.metrics.items()}, 8)
    assert means == {"clip_ratio/low_mean": 1 / 8, "clip_ratio/high_mean": 1 / 8, "clip_ratio/region_mean": 2 / 8}


def test_trls_means_count_tokens_that_the_model_was_not_run_on():
    sums = {"num_tokens": 4.0, "clip_ratio/low_mean": 1.0, "trained/entropy": 6.0}
    assert token_means(sums, 8) == {"clip_ratio/low_mean": 1 / 8, "trained/entropy": 6 / 4}


def test_a_mean_over_no_token_is_left_out():
    sums = {"num_tokens": 0.0, "clip_ratio/low_mean": 0.0, "trained/entropy": 0.0}
    assert token_means(sums, 8) == {"clip_ratio/low_mean": 0.0}
    assert token_means(sums, 0) == {}
