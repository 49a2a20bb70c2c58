"""The GRPO loss and its variants, as sums over tokens divided by a global denominator.

Shapes: B sequences, T completion tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

LossType = Literal["grpo", "dapo", "dr_grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """What a step's loss is divided by: counts over ALL micro-batches and ranks (all-reduce the counts, then build it)."""

    num_sequences: int  # completions, those left out of the loss included
    num_tokens: int  # completion tokens in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A micro-batch's share of the step's loss: shares (and their gradients) are summed over micro-batches and ranks."""

    loss: Tensor  # scalar with a graph
    metrics: dict[str, Tensor]  # detached SUMS over tokens under TRL's names, and their count as num_tokens; add up, then token_means()


def token_logprobs(logits_BTV: Tensor, token_ids_BT: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [B, T] (float32) of `token_ids_BT` at the sampling temperature; 0 (greedy) is taken as 1, as vLLM does."""
    raise NotImplementedError


def token_entropy(logits_BTV: Tensor, temperature: float) -> Tensor:
    """Entropy [B, T] in nats of each next-token distribution, without a graph."""
    raise NotImplementedError


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
    ref_logprobs_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
) -> LossOutput:
    """Clipped policy loss plus `beta` times the k3 KL divergence from the reference.

    On-policy (one optimizer step a batch), pass `logprobs_BT.detach()` as `old_logprobs_BT`. Multiply by the world size before backward
    where the engine averages gradients over ranks (DeepSpeed does). With mask 0 everywhere the loss is 0 with a graph.
    """
    raise NotImplementedError


def token_means(metrics: dict[str, float]) -> dict[str, float]:
    """Summed metrics of a step (over micro-batches and ranks) -> means over tokens under TRL's names."""
    raise NotImplementedError
