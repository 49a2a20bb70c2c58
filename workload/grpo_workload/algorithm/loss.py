"""The GRPO loss and its variants, as sums over tokens divided by a global denominator.

The denominator counts the whole step, so losses of micro-batches and ranks add up: how a step is split has no effect.
Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_spec.training import TrainingConfig


class EntropyCut(NamedTuple):
    """The tokens of a step in the policy's loss: those whose entropy is at or above `threshold`."""

    threshold: float  # in nats
    num_tokens: int  # number of these tokens over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Denominators of a step's loss: counts over ALL micro-batches and ranks (all-reduce them, then build this)."""

    num_sequences: int  # number of completions, including those left out of the loss, without lost episodes; at least 1
    num_tokens: int  # number of completion tokens in the loss
    # The same for a step of its generation on average, by which dapo divides, as TRL: tokens that were sampled together
    # weigh the same. None: a step has a generation of its own.
    mean_tokens: float | None = None
    entropy_cut: EntropyCut | None = None  # given exactly when `topEntropyQuantile` is below 1


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
    training: TrainingConfig,
    whole_logprobs_BT: Tensor | None = None,
    ref_logprobs_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
    kept_B1: Tensor | None = None,
    tokens_B: Tensor | None = None,
    own_loss: TokenLoss | None = None,
    adds_kl: bool = True,
) -> LossOutput:
    """Token losses of `lossType`, or the user's own, plus `kl_coef` times the KL divergence from the reference model.

    Before backward, multiply the loss by the world size where gradients are averaged over ranks, as DeepSpeed does.

    Args:
        logprobs_BT: TRL's `per_token_logps`, with a graph.
        old_logprobs_BT: TRL's `old_per_token_logps`; `logprobs_BT.detach()` if a generation serves one optimizer step.
        advantages_B: see `advantage.group_advantages`.
        mask_BT: TRL's `completion_mask`: 1 where a token is in the loss. If all of it is 0, the loss is 0 with a graph.
        scale: denominators of the whole step.
        training: the job's settings.
        whole_logprobs_BT: those of the whole distribution, with a graph, if sampling was truncated and `logprobs_BT`
            are of what it kept. The KL divergence is between whole distributions, as TRL's is.
        ref_logprobs_BT: TRL's `ref_per_token_logps`; given exactly when `kl_coef` > 0.
        entropy_BT: for the metric, `entropyCoef` (then with a graph), `topEntropyQuantile` and `own_loss`.
        weights_BT: TRL's `importance_sampling_ratio` from `mismatch.weights`; multiplies the token losses, not the KL
            divergence.
        kept_B1: from `mismatch.near_policy`; multiplies the token losses, not the KL divergence.
        tokens_B: tokens of each sequence's completion, if that may have several sequences; None: each is all of one.
            What is a mean over a completion divides by them; ratios of sequences remain each sequence's own.
        own_loss: the user's function, in place of the token losses of `lossType`.
        adds_kl: False if `own_loss` has a KL term of its own.

    Returns:
        The loss, and sums for num_tokens, the metrics of the token losses, trained/entropy if `entropy_BT` is given, kl
        if `kl_coef` > 0, trained/sampling/off_policy_mask/masked_fraction if `kept_B1` is given.
    """
    assert (training.kl_coef > 0) == (ref_logprobs_BT is not None), "reference log-probabilities go with a KL term"
    masked_BT, lengths_B = mask_BT == 0, mask_BT.sum(dim=1).clamp(min=1)
    tokens_B = lengths_B if tokens_B is None else tokens_B
    of_sequences = training.importance_sampling_level == "sequence"

    # Masked positions hold arbitrary numbers: exp() of them might overflow, and inf * 0 is NaN.
    log_ratio_BT = (logprobs_BT - old_logprobs_BT).masked_fill(masked_BT, 0.0)
    if of_sequences:  # GSPO, arXiv:2507.18071: (pi / pi_old) ** (1 / tokens), of the whole sequence
        mean_B1 = log_ratio_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = mean_B1.expand_as(mask_BT)
    ratio_BT = log_ratio_BT.exp()
    tokens = Tokens(
        logprobs_BT=logprobs_BT.masked_fill(masked_BT, 0.0),
        old_logprobs_BT=old_logprobs_BT.masked_fill(masked_BT, 0.0),
        ratio_BT=ratio_BT,
        advantages_B1=advantages_B.unsqueeze(1),
        mask_BT=mask_BT,
        ref_logprobs_BT=None if ref_logprobs_BT is None else ref_logprobs_BT.masked_fill(masked_BT, 0.0),
        entropy_BT=None if entropy_BT is None else entropy_BT.masked_fill(masked_BT, 0.0),
    )
    token_loss = own_loss or _TOKEN_LOSSES.get(training.loss_type, clipped_loss)
    token_loss_BT, its_metrics = token_loss(tokens, training)
    if weights_BT is not None:
        token_loss_BT = (token_loss_BT * weights_BT).masked_fill(masked_BT, 0.0)

    per_token: dict[str, Tensor] = {}
    if kept_B1 is not None:
        token_loss_BT = token_loss_BT * kept_B1
        per_token["trained/sampling/off_policy_mask/masked_fraction"] = (1 - kept_B1).expand_as(mask_BT)
    if tokens.entropy_BT is not None:
        per_token["trained/entropy"] = tokens.entropy_BT.detach()
    chosen_BT = mask_BT
    if scale.entropy_cut is not None:  # arXiv:2506.01939
        assert tokens.entropy_BT is not None
        chosen_BT = mask_BT * (tokens.entropy_BT >= scale.entropy_cut.threshold)
        token_loss_BT = token_loss_BT * chosen_BT
    if ref_logprobs_BT is not None:
        compared_BT = logprobs_BT if whole_logprobs_BT is None else whole_logprobs_BT
        log_ratio_BT = (ref_logprobs_BT - compared_BT).masked_fill(masked_BT, 0.0)
        k3_BT = log_ratio_BT.exp() - log_ratio_BT - 1  # http://joschu.net/blog/kl-approx.html
        # The gradient of k3 alone is not that of the KL divergence, even where the ratio is 1 (DeepSeek-V3.2,
        # arXiv:2512.02556).
        kl_BT = k3_BT * ratio_BT
        per_token["kl"] = kl_BT.detach()
        token_loss_BT = token_loss_BT + training.kl_coef * kl_BT if adds_kl else token_loss_BT

    metrics = {name: (values_BT * mask_BT).sum() for name, values_BT in per_token.items()}
    for name, values_BT in its_metrics.items():
        if of_sequences and own_loss is None:  # TRL's mean is over sequences, which `token_means` divides by tokens
            metrics[name] = (values_BT[:, 0] * (lengths_B / tokens_B)).sum() * (scale.num_tokens / scale.num_sequences)
        else:
            metrics[name] = (values_BT * mask_BT).sum()
    loss = _aggregate(token_loss_BT * mask_BT, tokens_B, scale, training)
    if training.entropy_coef > 0:  # less the mean entropy of the tokens in the policy's loss, whatever lossType is
        assert tokens.entropy_BT is not None
        num_chosen = scale.entropy_cut.num_tokens if scale.entropy_cut else scale.num_tokens
        loss = loss - training.entropy_coef * (tokens.entropy_BT * chosen_BT).sum() / max(num_chosen, 1)
    return LossOutput(loss=loss, metrics={"num_tokens": mask_BT.sum(), **metrics})


class Tokens(NamedTuple):
    """The terms of token losses. Log-probabilities are 0 at masked positions."""

    logprobs_BT: Tensor  # with a graph
    old_logprobs_BT: Tensor
    ratio_BT: Tensor  # pi / pi_old, with a graph: of the token, or the same for all tokens of a sequence
    advantages_B1: Tensor
    mask_BT: Tensor
    ref_logprobs_BT: Tensor | None
    entropy_BT: Tensor | None


TokenLosses = tuple[Tensor, dict[str, Tensor]]  # [B, T], and metrics [B, T] such as 1 where a token is clipped, else 0
TokenLoss = Callable[[Tokens, TrainingConfig], TokenLosses]


def clipped_loss(tokens: Tokens, training: TrainingConfig) -> TokenLosses:
    """PPO's loss (arXiv:1707.06347): - min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilonHigh) A).

    With `delta` (INTELLECT-2, arXiv:2505.07291; dual clipping, arXiv:1912.09729) the first ratio is at most delta, so
    that a negative advantage no longer weighs without bound.
    """
    ratio_BT, advantages_B1 = tokens.ratio_BT, tokens.advantages_B1
    low, high = 1 - training.epsilon, 1 + (training.epsilon_high or training.epsilon)
    bounded_BT = ratio_BT if training.delta is None else ratio_BT.clamp(max=training.delta)
    loss_BT = -torch.min(bounded_BT * advantages_B1, ratio_BT.clamp(low, high) * advantages_B1)
    return loss_BT, _clip_ratios(ratio_BT < low, ratio_BT > high, advantages_B1)


def _clip_ratios(is_low_BT: Tensor, is_high_BT: Tensor, advantages_B1: Tensor) -> dict[str, Tensor]:
    """Metrics of tokens outside of the bounds, which are clipped where the advantage would move them further out."""
    is_low_BT, is_high_BT = is_low_BT & (advantages_B1 < 0), is_high_BT & (advantages_B1 > 0)
    return {
        "clip_ratio/low_mean": is_low_BT.float(),
        "clip_ratio/high_mean": is_high_BT.float(),
        "clip_ratio/region_mean": (is_low_BT | is_high_BT).float(),
    }


def cispo_loss(tokens: Tokens, training: TrainingConfig) -> TokenLosses:
    """MiniMax-M1's loss (arXiv:2506.13585): - stop_gradient(min(ratio, epsilonHigh)) A log pi.

    A token whose ratio is clipped keeps a gradient, other than in PPO's loss. As in TRL and ScaleRL (arXiv:2510.13786),
    epsilonHigh is the bound itself.
    """
    ratio_BT, advantages_B1 = tokens.ratio_BT, tokens.advantages_B1
    assert training.epsilon_high is not None, "a rule of LossConfig"
    loss_BT = -ratio_BT.detach().clamp(max=training.epsilon_high) * advantages_B1 * tokens.logprobs_BT
    is_clipped_BT = (ratio_BT > training.epsilon_high) & (advantages_B1 > 0)
    return loss_BT, {"cispo_clip_ratio": is_clipped_BT.float()}


def sapo_loss(tokens: Tokens, training: TrainingConfig) -> TokenLosses:
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): - (4 / t) sigmoid(t (ratio - 1)) A.

    The temperature t is sapoTemperaturePos where A > 0, else sapoTemperatureNeg: the larger it is, the faster the
    gradient fades as the ratio leaves 1.
    """
    ratio_BT, advantages_B1 = tokens.ratio_BT, tokens.advantages_B1
    positive, negative = training.sapo_temperature_pos, training.sapo_temperature_neg
    temperature_B1 = torch.where(advantages_B1 > 0, positive, negative).to(ratio_BT.dtype)
    return -(torch.sigmoid(temperature_B1 * (ratio_BT - 1)) * 4 / temperature_B1) * advantages_B1, {}


def gmpo_loss(tokens: Tokens, training: TrainingConfig) -> TokenLosses:
    """Geometric-Mean Policy Optimization (arXiv:2507.20673): - A times the geometric mean of tokens' clipped ratios.

    Log-ratios are clipped at -epsilon and epsilonHigh, as PPO clips ratios. All tokens of a completion have its loss.
    """
    log_ratio_BT, advantages_B1 = tokens.logprobs_BT - tokens.old_logprobs_BT, tokens.advantages_B1
    low, high = -training.epsilon, training.epsilon_high or training.epsilon
    sign_B1 = advantages_B1.sign()
    clipped_BT = sign_B1 * torch.min(sign_B1 * log_ratio_BT, sign_B1 * log_ratio_BT.clamp(low, high))
    lengths_B1 = tokens.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    mean_B1 = (clipped_BT * tokens.mask_BT).sum(dim=1, keepdim=True) / lengths_B1
    loss_B1 = -advantages_B1 * mean_B1.exp()
    return loss_B1.expand_as(log_ratio_BT), _clip_ratios(log_ratio_BT < low, log_ratio_BT > high, advantages_B1)


_TOKEN_LOSSES: dict[str, TokenLoss] = {"cispo": cispo_loss, "sapo": sapo_loss, "gmpo": gmpo_loss}


def _aggregate(token_loss_BT: Tensor, tokens_B: Tensor, scale: LossScale, training: TrainingConfig) -> Tensor:
    """Divide the sum of token losses. What TRL divides by counts of a micro-batch (bnpo) is divided by the step's."""
    match training.loss_type:
        case "dapo" | "cispo":  # arXiv:2503.14476: the step's tokens, or their mean over the steps of a generation
            return token_loss_BT.sum() / max(scale.mean_tokens or scale.num_tokens, 1)
        case "bnpo":  # the step's tokens
            return token_loss_BT.sum() / max(scale.num_tokens, 1)
        case "grpo" | "sapo" | "gmpo":  # arXiv:2402.03300: the sequence's own tokens, then the step's sequences
            return (token_loss_BT.sum(dim=1) / tokens_B).sum() / scale.num_sequences
        case "dr_grpo":  # arXiv:2503.20783: as many tokens as the step's sequences might have
            return token_loss_BT.sum() / (scale.num_sequences * training.max_completion_length)


def token_means(metrics: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Turn metrics summed over the whole step into means over tokens; a mean over no token is left out.

    The model is not run on completions without a gradient (`step_plan`). TRL's clip ratios and KL divergence are still
    means over all `num_tokens` tokens in the loss: tokens of advantage 0 are never clipped, and with a KL term none is
    left out. `trained/*` are means over the tokens that the model was run on.
    """
    counts = {name: metrics["num_tokens"] if name.startswith("trained/") else num_tokens for name in metrics}
    return {name: value / counts[name] for name, value in metrics.items() if name != "num_tokens" and counts[name]}
