"""The difference of trainer and generator in log-probabilities of the same tokens, and the loss's correction of it.

The generator computes with other kernels, sometimes in another precision, so its samples do not quite follow the
policy. There are two corrections. Either the ratio policy / generator multiplies the loss (the modes of TRL 1.16's
`vllm_importance_sampling_mode`), or the generator's log-probabilities replace the old policy's (verl's bypass mode).
The default is the ratio of a token. That of a sequence is the unbiased one, but its logarithm has the variance of a
token's times the length: of long completions it is nearly 0 or masked, by rounding alone.
The policy is the one that the generation began with. If that serves one optimizer step, its log-probabilities come from
the training forward pass, at no extra cost.

Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_spec.loss import Correction

BINS = 1024  # number of bins in the histogram of log ratios
WIDEST = 5.0
"""Largest |log ratio| of the histogram, in nats; larger ones are counted in the outermost bins."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}

_PREFIX = "trained/sampling/importance_sampling_ratio"
_DIFFERENCE = "trained/sampling/sampling_logp_difference"


@torch.no_grad()
def log_ratios(logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Log of the ratio policy / generator [B, T]; 0 at masked tokens, and not finite where a log-probability is not."""
    return (logprobs_BT - sampling_logprobs_BT).masked_fill(mask_BT == 0, 0.0)


@torch.no_grad()
def weights(
    log_ratios_BT: Tensor, correction: Correction, clip_min: float | None, clip_max: float | None
) -> Tensor | None:
    """Factors for the token losses, TRL's `importance_sampling_ratio`; None for no correction.

    [B, T] ratios of tokens, or [B, 1] ratios of whole sequences with `sequence_*`. `*_truncate` clamps ratios to
    [`clip_min`, `clip_max`], `*_mask` sets ratios outside of it to 0; None is no bound.
    """
    if correction in ("none", "bypass"):
        return None
    level, _, how = correction.partition("_")
    ratios = (log_ratios_BT.sum(dim=1, keepdim=True) if level == "sequence" else log_ratios_BT).exp()
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    if how == "truncate":
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


@torch.no_grad()
def near_policy(
    logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, threshold: float
) -> Tensor:
    """TRL's off-policy sequence mask (DeepSeek-V3.2, arXiv:2512.02556): 1 for sequences that stay in the loss [B, 1].

    What should become less likely, and is already less likely than when it was sampled by more than `threshold` nats a
    token on average, teaches nothing and may destabilise: it is left out. Log-probabilities that are not finite say
    nothing of it.
    """
    drift_BT = (sampling_logprobs_BT - logprobs_BT).masked_fill(mask_BT == 0, 0.0).nan_to_num(nan=0.0)
    drift_B1 = drift_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1.0)
    return ((advantages_B.unsqueeze(1) >= 0) | (drift_B1 <= threshold)).to(mask_BT.dtype)


@torch.no_grad()
def tally(
    log_ratios_BT: Tensor, weights_BT: Tensor | None, mask_BT: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums over tokens and maxima for `describe`; over micro-batches and ranks, add up sums and take maxima of maxima.

    `weights_BT` are the factors that the loss used; those of whole sequences [B, 1] are counted once a sequence, as TRL
    does. Without correction (None), the ratios of tokens are reported.
    """
    # Nothing here may wait for the device: work on whole rows and their mask, since selecting tokens would have to
    # fetch their number.
    ratios_BT, is_out_BT = log_ratios_BT.exp(), mask_BT == 0
    used = ratios_BT if weights_BT is None else weights_BT
    counted = mask_BT if used.shape == mask_BT.shape else mask_BT.amax(dim=1, keepdim=True)
    bins_BT = (
        ((log_ratios_BT.nan_to_num().clamp(-WIDEST, WIDEST) + WIDEST) * (BINS / (2 * WIDEST)))
        .long()
        .clamp(max=BINS - 1)
    )
    sums = {
        f"{_DIFFERENCE}/mean": log_ratios_BT.abs().sum(),
        "trained/sampling/kl": ((ratios_BT - 1 - log_ratios_BT) * mask_BT).sum(),
        "ratio": (ratios_BT * mask_BT).sum(),
        "ratio_squared": (ratios_BT.square() * mask_BT).sum(),
        "used": (used * counted).sum(),
        "used_count": counted.sum(),
        "used_zero": ((used == 0) * counted).sum(),
        "histogram": mask_BT.new_zeros(BINS).scatter_add_(0, bins_BT.flatten(), mask_BT.flatten()),
    }
    largest = {
        f"{_DIFFERENCE}/max": log_ratios_BT.abs().masked_fill(is_out_BT, 0.0).max(),
        f"{_PREFIX}/max": used.masked_fill(counted == 0, -math.inf).max(),
        "used_min": (-used).masked_fill(counted == 0, -math.inf).max(),
    }
    return sums, largest


def describe(sums: dict[str, Tensor], largest: dict[str, Tensor], num_tokens: float) -> dict[str, float]:
    """Metrics of a step from its combined `tally`: TRL's, and KL divergence, effective sample size, ratio quantiles.

    All are over the `num_tokens` tokens that the model was trained on, hence `trained/` before TRL's names; empty if
    there are none. `sampling/kl` estimates KL(generator || policy) in nats a token, by k3. `sampling/ess` is the
    effective sample size as a share of the tokens, (sum of ratios)^2 / (n x sum of squared ratios). Quantiles come from
    a histogram and are exact to 1%.
    """
    if num_tokens == 0:
        return {}
    cumulated = sums["histogram"].cumsum(0)
    edges = torch.linspace(-WIDEST, WIDEST, BINS + 1, dtype=torch.float64)
    middles = (edges[1:] + edges[:-1]) / 2
    metrics = {name: float(sums[name]) / num_tokens for name in (f"{_DIFFERENCE}/mean", "trained/sampling/kl")}
    metrics[f"{_DIFFERENCE}/max"] = float(largest[f"{_DIFFERENCE}/max"])
    used_count = max(float(sums["used_count"]), 1.0)
    metrics |= {
        "trained/sampling/ess": float(sums["ratio"]) ** 2 / (num_tokens * float(sums["ratio_squared"])),
        f"{_PREFIX}/min": -float(largest["used_min"]),
        f"{_PREFIX}/mean": float(sums["used"]) / used_count,
        f"{_PREFIX}/max": float(largest[f"{_PREFIX}/max"]),
        f"{_PREFIX}/masked_fraction": float(sums["used_zero"]) / used_count,
    }
    for name, share in QUANTILES.items():
        place = int(torch.searchsorted(cumulated.cpu().double(), share * float(cumulated[-1])))
        metrics[f"{_PREFIX}/{name}"] = math.exp(float(middles[min(place, BINS - 1)]))
    return metrics
