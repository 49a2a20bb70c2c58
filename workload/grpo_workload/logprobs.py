"""Log-probabilities and entropies of tokens straight from hidden states: logits exist for a slice of the vocabulary at a time.

The full logits would be the largest tensor of a training step by far (34,000 tokens and 152,000 words: 10 GB in bfloat16, 20 in float32).
The arithmetic is done inside the forward of the model's own output layer, so that hooks on that layer act as always: ZeRO-3's gather its
weight before both passes. The same idea with slices of the vocabulary: Liger (arXiv:2410.10989), Cut Your Losses (arXiv:2411.09009).

Shapes: K tokens to score, H hidden size, V vocabulary, W words of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

WORDS = 8192
"""Of a slice of the vocabulary."""

# What some models do to logits behind the output layer, where log-probabilities come out here: field of the configuration, value for none.
_AFTERWARDS = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}


class Scorer:
    """Turns a causal language model's output layer into one that scores tokens, within `scoring`."""

    def __init__(self, model: Any, heads: Sequence[Any] | None = None) -> None:
        """Wrap the output layer of `model`, or `heads` where it has several. ValueError if the model changes its logits afterwards."""
        config = model.config.get_text_config()
        for name, nothing in _AFTERWARDS.items():
            if getattr(config, name, nothing) not in (nothing, None):
                raise ValueError(f"model: {config.model_type} changes its logits by {name}, which training does not know; use another")
        self._asked: tuple[Tensor, Tensor, float] | None = None
        for head in heads or [model.get_output_embeddings()]:
            self._wrap(head)

    def _wrap(self, head: nn.Linear) -> None:
        plain = head.forward

        def forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
            if self._asked is None:
                return plain(hidden)
            places_K, targets_K, temperature = self._asked
            return score(hidden.flatten(0, -2).index_select(0, places_K), layer.weight, layer.bias, targets_K, temperature)

        head.forward = MethodType(forward, head)  # type: ignore[method-assign]

    @contextmanager
    def scoring(self, places_K: Tensor, targets_K: Tensor, temperature: float) -> Iterator[None]:
        """Within it, the model's `logits` are `score` of `targets_K` at the hidden states `places_K`, counted over all rows."""
        self._asked = places_K, targets_K, temperature
        try:
            yield
        finally:
            self._asked = None


def score(hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_K: Tensor, temperature: float) -> Tensor:
    """Log-probabilities and entropies [K, 2] (float32, nats) of `targets_K` in softmax((hidden @ weight.T + bias) / temperature).

    Temperature 0 (greedy) is taken as 1, as vLLM does. Entropies have no gradient.
    """
    apply = cast(Callable[..., Tensor], _Score.apply)
    return apply(hidden_KH, weight_VH, bias_V, targets_K, 1 / (temperature or 1.0))


class _Score(torch.autograd.Function):
    """`score`, whose backward makes each slice of the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_K: Tensor, scale: float) -> Tensor:
        fold = _fold_on(hidden_KH)
        state_4K = torch.zeros(4, len(targets_K), device=hidden_KH.device)
        state_4K[0] = -torch.inf
        for start, logits_KW in _slices(hidden_KH, weight_VH, bias_V):
            fold(logits_KW, targets_K - start, scale, state_4K)
        largest_K, sum_K, weighted_K, target_K = state_4K
        lse_K = largest_K + sum_K.log()
        ctx.save_for_backward(hidden_KH, weight_VH, bias_V, targets_K, lse_K)
        ctx.scale = scale
        # Rounding may bring a certain token's entropy to just below 0.
        return torch.stack([target_K - lse_K, (lse_K - weighted_K / sum_K).clamp(min=0)], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_KH, weight_VH, bias_V, targets_K, lse_K = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        unfold = _unfold_on(hidden_KH)
        gradient_K = gradients[0][:, 0].float().contiguous()
        # In float32: slices are summed here.
        hidden_gradient_KH = torch.zeros_like(hidden_KH, dtype=torch.float32) if needs_hidden else None
        weight_gradient_VH = torch.empty_like(weight_VH) if needs_weight else None
        bias_gradient_V = torch.empty_like(bias_V) if needs_bias else None
        for start, logits_KW in _slices(hidden_KH, weight_VH, bias_V):
            words = slice(start, start + logits_KW.size(1))
            unfold(logits_KW, targets_K - start, lse_K, gradient_K, ctx.scale)
            if hidden_gradient_KH is not None:
                _add_product(hidden_gradient_KH, logits_KW, weight_VH[words])
            if weight_gradient_VH is not None:
                torch.mm(logits_KW.T, hidden_KH, out=weight_gradient_VH[words])
            if bias_gradient_V is not None:
                bias_gradient_V[words] = logits_KW.sum(dim=0)
        hidden_gradient = hidden_gradient_KH.to(hidden_KH.dtype) if hidden_gradient_KH is not None else None
        return hidden_gradient, weight_gradient_VH, bias_gradient_V, None, None


def _slices(hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Logits [K, W] of each slice, in one buffer, and the slice's first word."""
    num_words = weight_VH.size(0)
    buffer = hidden_KH.new_empty(hidden_KH.size(0) * min(WORDS, num_words))
    for start in range(0, num_words, WORDS):
        rows_WH = weight_VH[start : start + WORDS]
        logits_KW = buffer[: hidden_KH.size(0) * len(rows_WH)].view(-1, len(rows_WH))
        if bias_V is None:
            torch.mm(hidden_KH, rows_WH.T, out=logits_KW)
        else:
            torch.addmm(bias_V[start : start + WORDS], hidden_KH, rows_WH.T, out=logits_KW)
        yield start, logits_KW


def _add_product(sum_KH: Tensor, left_KW: Tensor, right_WH: Tensor) -> None:
    """`sum_KH += left_KW @ right_WH`, whose product is not rounded to the type of its factors first."""
    if sum_KH.device.type == "cuda" and left_KW.dtype != torch.float32:
        torch.addmm(sum_KH, left_KW, right_WH, out_dtype=torch.float32, out=sum_KH)
    else:
        sum_KH.addmm_(left_KW.float(), right_WH.float())


def _fold_on(tensor: Tensor) -> Callable[..., None]:
    if tensor.device.type == "cuda":
        from grpo_workload.logprobs_triton import fold

        return fold
    return _fold


def _unfold_on(tensor: Tensor) -> Callable[..., None]:
    if tensor.device.type == "cuda":
        from grpo_workload.logprobs_triton import unfold

        return unfold
    return _unfold


def _fold(logits_KW: Tensor, places_K: Tensor, scale: float, state_4K: Tensor) -> None:
    """Take a slice into `state_4K`: largest logit, sum of exp(logit - largest), the same weighted by the logit, the target's logit.

    The softmax goes on from slice to slice as in arXiv:1805.02867. A place outside the slice has its target in another one.
    """
    scaled_KW = logits_KW.float() * scale
    largest_K = torch.maximum(state_4K[0], scaled_KW.amax(dim=1))
    weights_KW = (scaled_KW - largest_K.unsqueeze(1)).exp()
    state_4K[1:3] *= (state_4K[0] - largest_K).exp()
    state_4K[0] = largest_K
    state_4K[1] += weights_KW.sum(dim=1)
    state_4K[2] += (weights_KW * scaled_KW).sum(dim=1)
    inside_K = (places_K >= 0) & (places_K < logits_KW.size(1))
    found_K = scaled_KW.gather(1, places_K.where(inside_K, 0).unsqueeze(1)).squeeze(1)
    state_4K[3] = torch.where(inside_K, found_K, state_4K[3])


def _unfold(logits_KW: Tensor, places_K: Tensor, lse_K: Tensor, gradient_K: Tensor, scale: float) -> None:
    """Overwrite a slice of the logits by its gradient: that of the token's log-probability times (is the target - probability)."""
    probabilities_KW = (logits_KW.float() * scale - lse_K.unsqueeze(1)).exp()
    is_target_KW = torch.arange(logits_KW.size(1), device=logits_KW.device) == places_K.unsqueeze(1)
    logits_KW.copy_((is_target_KW.float() - probabilities_KW) * (gradient_K * scale).unsqueeze(1))
