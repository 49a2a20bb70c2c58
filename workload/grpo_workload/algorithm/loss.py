"""The GRPO loss and its variants, as sums over tokens divided by a global denominator.

The denominator counts the whole step, so losses of micro-batches and ranks add up: how a step is split has no effect.
Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["grpo", "dapo", "dr_grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Denominators of a step's loss: counts over ALL micro-batches and ranks (all-reduce them, then build this)."""

    num_sequences: int  # number of completions, including those left out of the loss
    num_tokens: int  # number of completion tokens in the loss
    # The same for a step of its generation on average, by which dapo divides, as TRL: tokens that were sampled together
    # weigh the same. None: a step has a generation of its own.
    mean_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A micro-batch's share of the step's loss: sum the shares, and their gradients, over micro-batches and ranks."""

    loss: Tensor  # scalar with a graph
    # Detached SUMS over tokens under TRL's metric names, and num_tokens, their number: add them up, then token_means().
    metrics: dict[str, Tensor]


def grpo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    scale: LossScale,
    loss_type: LossType,
    epsilon: float,
    epsilon_high: float | None,
    beta: float,
    max_completion_length: int,
    whole_logprobs_BT: Tensor | None = None,
    ref_logprobs_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
    kept_B1: Tensor | None = None,
) -> LossOutput:
    """Clipped policy loss plus `beta` times the KL divergence from the reference model, with the defaults of TRL 1.16.

    Before backward, multiply the loss by the world size where gradients are averaged over ranks, as DeepSpeed does.

    Args:
        logprobs_BT: TRL's `per_token_logps`, with a graph.
        old_logprobs_BT: TRL's `old_per_token_logps`; `logprobs_BT.detach()` if a generation serves one optimizer step.
        advantages_B: see `advantage.group_advantages`.
        mask_BT: TRL's `completion_mask`: 1 where a token is in the loss. If all of it is 0, the loss is 0 with a graph.
        scale: denominators of the whole step.
        loss_type: what the summed token losses are divided by. dapo (arXiv:2503.14476): the step's tokens in the loss,
            or `scale.mean_tokens`. grpo (arXiv:2402.03300): the sequence's own tokens, then the step's sequences.
            dr_grpo (arXiv:2503.20783): the step's sequences x `max_completion_length`.
        epsilon: the ratio is clipped to [1 - epsilon, 1 + epsilon_high].
        epsilon_high: None means `epsilon`.
        beta: weight of the KL divergence, estimated for each token as k3 times the ratio.
        max_completion_length: in tokens, for dr_grpo.
        whole_logprobs_BT: those of the whole distribution, with a graph, if sampling was truncated and `logprobs_BT`
            are of what it kept. The KL divergence is between whole distributions, as TRL's is.
        ref_logprobs_BT: TRL's `ref_per_token_logps`; given exactly when `beta` > 0.
        entropy_BT: for the metric alone.
        weights_BT: TRL's `importance_sampling_ratio` from `mismatch.weights`; multiplies the clipped loss, not the KL
            divergence.
        kept_B1: from `mismatch.near_policy`; multiplies the clipped loss, not the KL divergence.

    Returns:
        The loss, and sums for num_tokens, clip_ratio/{low,high,region}_mean, trained/entropy if `entropy_BT` is given,
        kl if `beta` > 0, trained/sampling/off_policy_mask/masked_fraction if `kept_B1` is given.
    """
    assert (beta > 0) == (ref_logprobs_BT is not None), "reference log-probabilities go with beta > 0"
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    masked_BT = mask_BT == 0
    advantages_B1 = advantages_B.unsqueeze(1)

    # Masked positions hold arbitrary numbers: exp() of them might overflow, and inf * 0 is NaN.
    ratio_BT = (logprobs_BT - old_logprobs_BT).masked_fill(masked_BT, 0.0).exp()
    token_loss_BT = -torch.min(ratio_BT * advantages_B1, ratio_BT.clamp(low, high) * advantages_B1)
    if weights_BT is not None:
        token_loss_BT = (token_loss_BT * weights_BT).masked_fill(masked_BT, 0.0)

    is_low_BT = (ratio_BT < low) & (advantages_B1 < 0)
    is_high_BT = (ratio_BT > high) & (advantages_B1 > 0)
    per_token = {
        "clip_ratio/low_mean": is_low_BT.float(),
        "clip_ratio/high_mean": is_high_BT.float(),
        "clip_ratio/region_mean": (is_low_BT | is_high_BT).float(),
    }
    if kept_B1 is not None:
        token_loss_BT = token_loss_BT * kept_B1
        per_token["trained/sampling/off_policy_mask/masked_fraction"] = (1 - kept_B1).expand_as(mask_BT)
    if entropy_BT is not None:
        per_token["trained/entropy"] = entropy_BT.masked_fill(masked_BT, 0.0)
    if ref_logprobs_BT is not None:
        compared_BT = logprobs_BT if whole_logprobs_BT is None else whole_logprobs_BT
        log_ratio_BT = (ref_logprobs_BT - compared_BT).masked_fill(masked_BT, 0.0)
        k3_BT = log_ratio_BT.exp() - log_ratio_BT - 1  # http://joschu.net/blog/kl-approx.html
        # The gradient of k3 alone is not that of the KL divergence, even where the ratio is 1 (DeepSeek-V3.2,
        # arXiv:2512.02556).
        kl_BT = k3_BT * ratio_BT
        per_token["kl"] = kl_BT.detach()
        token_loss_BT = token_loss_BT + beta * kl_BT

    metrics = {name: (values_BT * mask_BT).sum() for name, values_BT in per_token.items()}
    loss = _aggregate(token_loss_BT * mask_BT, mask_BT, scale, loss_type, max_completion_length)
    return LossOutput(loss=loss, metrics={"num_tokens": mask_BT.sum(), **metrics})


def token_means(metrics: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Turn metrics summed over the whole step into means over tokens; a mean over no token is left out.

    The model is not run on completions without a gradient (`step_plan`). TRL's clip ratios and KL divergence are still
    means over all `num_tokens` tokens in the loss: tokens of advantage 0 are never clipped, and with a KL term none is
    left out. `trained/*` are means over the tokens that the model was run on.
    """
    counts = {name: metrics["num_tokens"] if name.startswith("trained/") else num_tokens for name in metrics}
    return {name: value / counts[name] for name, value in metrics.items() if name != "num_tokens" and counts[name]}


def _aggregate(
    token_loss_BT: Tensor, mask_BT: Tensor, scale: LossScale, loss_type: LossType, max_completion_length: int
) -> Tensor:
    match loss_type:
        case "dapo":
            return token_loss_BT.sum() / max(scale.mean_tokens or scale.num_tokens, 1)
        case "grpo":
            return (token_loss_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum() / scale.num_sequences
        case "dr_grpo":
            return token_loss_BT.sum() / (scale.num_sequences * max_completion_length)
