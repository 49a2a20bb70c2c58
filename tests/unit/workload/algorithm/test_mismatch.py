"""Correction weights and metrics of the generator mismatch, against formulas written out by hand."""

import math

import pytest
import torch

from grpo_workload.algorithm import mismatch

MASK = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
LOGS = torch.tensor([[0.5, -1.0, 0.1], [2.0, 0.3, 0.0]])


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("token_truncate", LOGS.exp().clamp(0.5, 3)),
        ("token_mask", torch.tensor([[math.exp(0.5), 0, math.exp(0.1)], [0, math.exp(0.3), 1]])),
        ("sequence_truncate", torch.tensor([[math.exp(-0.4)], [3.0]])),
        ("sequence_mask", torch.tensor([[math.exp(-0.4)], [0.0]])),
    ],
)
def test_weights_of_each_correction(correction, expected):
    torch.testing.assert_close(mismatch.weights(LOGS, correction, 0.5, 3.0), expected)


def test_without_bounds_weights_are_the_ratios():
    torch.testing.assert_close(mismatch.weights(LOGS, "token_mask", None, None), LOGS.exp())


@pytest.mark.parametrize("correction", ["none", "bypass"])
def test_none_and_bypass_give_no_weights(correction):
    assert mismatch.weights(LOGS, correction, None, 3.0) is None


def test_masked_tokens_get_ratio_1_and_a_logprob_that_is_not_finite_stays_visible():
    sampling = torch.tensor([[-1.0, math.nan, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    logs = mismatch.log_ratios(torch.tensor([[-0.5, -1.0, -1.0]]), sampling, mask)
    assert logs[0, [0, 2]].tolist() == [0.5, 0.0]
    metrics = described(logs, mismatch.weights(logs, "sequence_mask", None, 3.0), mask)
    assert math.isnan(metrics["trained/sampling/kl"])
    assert math.isnan(metrics["trained/sampling/sampling_logp_difference/mean"])


def test_only_sequences_that_should_and_did_become_less_likely_are_left_out():
    sampling = torch.tensor([[-1.0, -1, -1], [-1, -1, 0], [-1, math.nan, 0], [-1, -1, 0]])
    now = torch.tensor([[-2.0, -1, -1], [-2, -1, 0], [-1, -9, 0], [-2, -1, 0]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 0]])
    kept = mismatch.near_policy(now, sampling, torch.tensor([-1.0, -1, -1, 1]), mask, 0.4)
    assert kept.squeeze(1).tolist() == [1, 0, 1, 1]  # 1/3 nat a token; 1/2; unknown; 1/2, with a positive advantage


def described(logs, weights, mask):
    sums, largest = mismatch.tally(logs, weights, mask)
    return mismatch.describe({name: value.double() for name, value in sums.items()}, largest, float(mask.sum()))


def test_metrics_of_a_step():
    tokens = torch.tensor([0.5, -1.0, 0.1, 2.0, 0.3])
    weights = mismatch.weights(LOGS, "sequence_mask", None, 3.0)
    metrics = described(LOGS, weights, MASK)
    ratios = tokens.exp()
    assert metrics["trained/sampling/sampling_logp_difference/mean"] == pytest.approx(tokens.abs().mean().item())
    assert metrics["trained/sampling/sampling_logp_difference/max"] == pytest.approx(2.0)
    assert metrics["trained/sampling/kl"] == pytest.approx((ratios - 1 - tokens).mean().item())
    assert metrics["trained/sampling/ess"] == pytest.approx((ratios.sum() ** 2 / (5 * ratios.square().sum())).item())
    assert metrics["trained/sampling/importance_sampling_ratio/min"] == 0
    assert metrics["trained/sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(-0.4))
    assert metrics["trained/sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(-0.4) / 2)
    assert metrics["trained/sampling/importance_sampling_ratio/masked_fraction"] == 0.5
    assert metrics["trained/sampling/importance_sampling_ratio/p50"] == pytest.approx(math.exp(0.3), rel=0.01)
    assert metrics["trained/sampling/importance_sampling_ratio/p99"] == pytest.approx(math.exp(2.0), rel=0.01)


def test_without_correction_the_metrics_are_of_token_ratios():
    assert described(LOGS, None, MASK)["trained/sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(2.0))


def test_without_tokens_there_are_no_metrics():
    assert described(LOGS, None, torch.zeros(2, 3)) == {}
