"""The words that sampling may choose from: min-p, top-k and top-p, in vLLM's order and by its definitions.

The words that are kept share all the probability. vLLM reports log-probabilities of that distribution, so the trainer
computes them under the same truncation, taken from its own logits. A word at the boundary may be kept by one side and
not by the other, since their logits differ by rounding.

Shapes: K tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_spec.training import TrainingConfig


@dataclass(frozen=True, slots=True)
class Truncation:
    """The words that sampling leaves out of softmax(logits / temperature)."""

    temperature: float
    min_p: float = 0.0  # words of less than this share of the likeliest word's probability
    top_k: int = 0  # words after the first `top_k`; 0 leaves none out
    top_p: float = 1.0  # words after the first that together have at least this probability

    @staticmethod
    def of(training: TrainingConfig) -> Truncation | None:
        """Return the truncation of a job; None if it keeps the whole vocabulary."""
        # Greedy sampling, which vLLM reports without truncation, is for tests alone: the spec refuses temperature 0.
        if training.temperature == 0 or (training.min_p, training.top_k, training.top_p) == (0, 0, 1):
            return None
        return Truncation(training.temperature, training.min_p, training.top_k, training.top_p)

    def kept(self, logits_KV: Tensor) -> Tensor:
        """Whether each word is kept [K, V]; at least the likeliest one is."""
        scaled_KV = logits_KV.float() / self.temperature
        if self.min_p > 0:
            least_K1 = scaled_KV.amax(dim=1, keepdim=True) + math.log(self.min_p)
            scaled_KV = scaled_KV.masked_fill(scaled_KV < least_K1, -torch.inf)
        num_words = scaled_KV.size(1)
        count = min(self.top_k or num_words, num_words)
        if scaled_KV.device.type == "cpu" and count < num_words:
            # On CPUs vLLM keeps all words as likely as the last one; its kernel for GPUs keeps exactly this many.
            least_K1 = scaled_KV.topk(count).values[:, -1:]
            scaled_KV = scaled_KV.masked_fill(scaled_KV < least_K1, -torch.inf)
            count = num_words
        if self.top_p == 1 and count == num_words:
            return scaled_KV > -torch.inf
        logits_KC, words_KC = scaled_KV.sort(descending=True) if count == num_words else scaled_KV.topk(count)
        kept_KC = logits_KC > -torch.inf
        if self.top_p < 1:
            probabilities_KC = logits_KC.softmax(dim=1)
            # Of each word and all that are less likely: those that together have at most 1 - top_p are left out.
            rest_KC = probabilities_KC.flip(1).cumsum(dim=1).flip(1)
            kept_KC &= rest_KC > 1 - self.top_p
            kept_KC[:, 0] = True
        return torch.zeros_like(scaled_KV, dtype=torch.bool).scatter_(1, words_KC, kept_KC)
