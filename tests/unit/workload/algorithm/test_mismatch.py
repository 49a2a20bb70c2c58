"""Correction weights and metrics of the generator mismatch, against formulas written out by hand.

What a correction leaves of long completions: at the noise of bfloat16, and where the engine samples another policy.
"""

import math

import pytest
import torch

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm import mismatch

DEFAULTS = TrainingConfig()
CLIP = DEFAULTS.importance_sampling_clip_min, DEFAULTS.importance_sampling_clip_max
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
    assert metrics["trained/sampling/importance_sampling_ratio/p01"] == pytest.approx(math.exp(-1.0), rel=0.01)
    assert metrics["trained/sampling/importance_sampling_ratio/p50"] == pytest.approx(math.exp(0.3), rel=0.01)
    assert metrics["trained/sampling/importance_sampling_ratio/p99"] == pytest.approx(math.exp(2.0), rel=0.01)


def test_ratios_beyond_the_histogram_are_counted_in_its_last_bins():
    """Half a bin is 0.5%."""
    logs = torch.tensor([[-40.0, 0.2, 40.0]])
    metrics = described(logs, None, torch.ones(1, 3))
    names = ("p01", "p50", "p99")
    found = [math.log(metrics[f"trained/sampling/importance_sampling_ratio/{name}"]) for name in names]
    assert found == pytest.approx([-mismatch.WIDEST, 0.2, mismatch.WIDEST], abs=0.01)


def test_without_correction_the_metrics_are_of_token_ratios():
    assert described(LOGS, None, MASK)["trained/sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(2.0))


def test_without_tokens_there_are_no_metrics():
    assert described(LOGS, None, torch.zeros(2, 3)) == {}


def rounded(deviation, num_tokens, num_sequences):
    """Log ratios of tokens whose engine rounds: normal, and such that their mean ratio is 1, as sampling implies."""
    noise = torch.randn(num_sequences, num_tokens, generator=torch.Generator().manual_seed(num_tokens))
    return deviation * noise - deviation**2 / 2


@pytest.mark.parametrize("num_tokens", [256, 4096, 16384])
@pytest.mark.parametrize("deviation", [0.01, 0.016, 0.03, 0.06])
def test_the_default_keeps_the_loss_of_completions_of_any_length(deviation, num_tokens):
    """0.016 nats is what an H100 has in bfloat16, 0.06 a CPU."""
    logs = rounded(deviation, num_tokens, 32)
    weights = mismatch.weights(logs, DEFAULTS.importance_sampling_correction, *CLIP)
    assert weights.mean(dim=1).min() > 0.9, "of each sequence"
    assert weights.mean() == pytest.approx(1, abs=0.01)
    assert weights.sum() ** 2 / weights.square().sum() > 0.9 * weights.numel(), "and tokens weigh alike"


@pytest.mark.parametrize(
    ("deviation", "num_tokens", "left"),
    [(0.016, 256, 1.0), (0.016, 4096, 0.71), (0.016, 16384, 0.31), (0.03, 4096, 0.35), (0.03, 16384, 0.05)],
)
def test_ratios_of_whole_sequences_vanish_with_their_length(deviation, num_tokens, left):
    """The table of docs/training.md: sequence_mask leaves P(z < ln 3 / s - s / 2) of the loss, s^2 = tokens sigma^2."""
    spread = deviation * math.sqrt(num_tokens)
    expected = torch.special.ndtr(torch.tensor(math.log(3) / spread - spread / 2)).item()
    assert expected == pytest.approx(left, abs=0.005)
    weights = mismatch.weights(rounded(deviation, num_tokens, 256), "sequence_mask", None, 3.0)
    assert weights.mean().item() == pytest.approx(expected, abs=0.1)
    assert weights.sum() ** 2 / weights.square().sum() < (left + 0.1) * len(weights), "and few have all the weight"


def test_samples_of_another_policy_weigh_little_where_it_would_not_have_sampled_them():
    """An engine with wrong weights: the harm of a token is bounded, however long its completion is."""
    generator = torch.Generator().manual_seed(0)
    policy, engine = (torch.randn(64, generator=generator).mul(3).log_softmax(0) for _ in range(2))
    sampled = torch.multinomial(engine.exp(), 4096, replacement=True, generator=generator)
    logs = (policy - engine)[sampled].unsqueeze(0)
    weights = mismatch.weights(logs, DEFAULTS.importance_sampling_correction, *CLIP)
    assert weights.max() <= DEFAULTS.importance_sampling_clip_max
    assert weights.mean() < 0.5, "not the policy's: less than half of the loss is left"
    torch.testing.assert_close(weights[logs < -3], logs.exp()[logs < -3])
    metrics = described(logs, weights, torch.ones_like(logs))
    assert metrics["trained/sampling/kl"] > 1, "and the job is Degraded"
    assert mismatch.weights(logs, "sequence_mask", *CLIP).max() < 1e-6
