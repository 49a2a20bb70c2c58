"""Per-token log-probabilities and entropies from hidden states; logits exist for one slice of the vocabulary at a time.

The full logits would be by far the largest tensor of a training step (34,000 tokens x 152,000 words: 10 GB in bfloat16,
20 GB in float32). Liger (arXiv:2410.10989) and Cut Your Losses (arXiv:2411.09009) slice the vocabulary, too.

Shapes: K completion tokens of all sequences (targets), H hidden size, V vocabulary, W words of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from grpo_workload.algorithm.penalties import Penalised
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.logprobs import fold_plain
from grpo_workload.policy.logprobs.kept_words import find_kept, hide_others
from grpo_workload.policy.model.logit_change import LogitChange

WORDS = 8192
"""Number of words in a slice of the vocabulary."""

_NO_CHANGE = LogitChange()


def logprobs_and_entropies(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_K: Tensor,
    temperature: float,
    truncation: Truncation | None = None,
    change: LogitChange = _NO_CHANGE,
    penalised: Penalised | None = None,
    *,
    trains_entropy: bool = False,
) -> Tensor:
    """Log-probabilities of `targets_K`, and entropies, of softmax(change(hidden @ weight.T + bias) / temperature).

    [K, 2] in float32, in nats. Temperature 0 (greedy) counts as 1, as in vLLM. Entropies have a gradient only with
    `trains_entropy`. TRL computes the same from whole logits, by `selective_log_softmax` and `entropy_from_logits`.
    With a truncation or penalties [K, 3]: first the log-probabilities under them, then those two of the whole
    distribution.
    """
    kept_KY = None
    if truncation is not None:
        with torch.no_grad():
            kept_KY = find_kept(hidden_KH, weight_VH, bias_V, targets_K, truncation, change, penalised)
    apply = cast(Callable[..., Tensor], _Function.apply)
    scale = 1 / (temperature or 1.0)
    return apply(hidden_KH, weight_VH, bias_V, targets_K, scale, kept_KY, change, penalised, trains_entropy)


class _Function(torch.autograd.Function):
    """`logprobs_and_entropies`; the backward pass computes each slice of the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_K: Tensor,
        scale: float,
        kept_KY: Tensor | None,
        change: LogitChange,
        penalised: Penalised | None,
        trains_entropy: bool,
    ) -> Tensor:
        fold, _ = _passes(hidden_KH)
        ctx.scale, ctx.change, ctx.penalised, ctx.trains_entropy = scale, change, penalised, trains_entropy
        is_whole = kept_KY is None and penalised is None
        whole_4K, kept_4K = _no_words(targets_K), _no_words(targets_K)
        for start, logits_KW in _slices(hidden_KH, weight_VH, bias_V, change, penalised):
            fold(logits_KW, targets_K - start, scale, whole_4K)
            if not is_whole:
                _restrict(logits_KW, start, penalised, kept_KY)
                fold(logits_KW, targets_K - start, scale, kept_4K)
        largest_K, sum_K, weighted_K, target_K = whole_4K
        lse_K = largest_K + sum_K.log()
        kept_lse_K = lse_K if is_whole else kept_4K[0] + kept_4K[1].log()
        # Rounding may bring the entropy to just below 0 where a token is certain.
        entropy_K = (lse_K - weighted_K / sum_K).clamp(min=0)
        ctx.save_for_backward(hidden_KH, weight_VH, bias_V, targets_K, lse_K, kept_lse_K, kept_KY, entropy_K)
        if is_whole:
            return torch.stack([target_K - lse_K, entropy_K], dim=1)
        return torch.stack([kept_4K[3] - kept_lse_K, entropy_K, target_K - lse_K], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_KH, weight_VH, bias_V, targets_K, lse_K, kept_lse_K, kept_KY, entropy_K = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        _, unfold = _passes(hidden_KH)
        columns = gradients[0].float().unbind(dim=1)
        gradient_K = columns[0].contiguous()
        entropy = (entropy_K, columns[1].contiguous()) if ctx.trains_entropy else None
        # In float32, since it is a sum over slices.
        hidden_gradient_KH = torch.zeros_like(hidden_KH, dtype=torch.float32) if needs_hidden else None
        weight_gradient_VH = torch.empty_like(weight_VH) if needs_weight else None
        bias_gradient_V = torch.empty_like(bias_V) if needs_bias else None
        for start, logits_KW in _slices(hidden_KH, weight_VH, bias_V, ctx.change, ctx.penalised):
            words, places_K = slice(start, start + logits_KW.size(1)), targets_K - start
            slope_KW = ctx.change.slope(logits_KW)
            if len(columns) == 2:
                unfold(logits_KW, places_K, lse_K, gradient_K, ctx.scale, entropy)
            else:
                whole_KW = logits_KW.clone()
                unfold(whole_KW, places_K, lse_K, columns[2].contiguous(), ctx.scale, entropy)
                penalty = _restrict(logits_KW, start, ctx.penalised, kept_KY)
                unfold(logits_KW, places_K, kept_lse_K, gradient_K, ctx.scale)
                if penalty is not None:
                    place_P, slope_P = penalty
                    logits_KW.view(-1)[place_P] *= slope_P
                logits_KW += whole_KW
            if ctx.change != _NO_CHANGE:
                logits_KW *= slope_KW
            logits_KW = logits_KW.to(hidden_KH.dtype)
            if hidden_gradient_KH is not None:
                _add_product(hidden_gradient_KH, logits_KW, weight_VH[words])
            if weight_gradient_VH is not None:
                torch.mm(logits_KW.T, hidden_KH, out=weight_gradient_VH[words])
            if bias_gradient_V is not None:
                bias_gradient_V[words] = logits_KW.sum(dim=0)
        hidden_gradient = hidden_gradient_KH.to(hidden_KH.dtype) if hidden_gradient_KH is not None else None
        return hidden_gradient, weight_gradient_VH, bias_gradient_V, None, None, None, None, None, None


def _no_words(targets_K: Tensor) -> Tensor:
    """The running softmax of `fold` before its first slice."""
    state_4K = torch.zeros(4, len(targets_K), device=targets_K.device)
    state_4K[0] = -torch.inf
    return state_4K


def _restrict(
    logits_KW: Tensor, start: int, penalised: Penalised | None, kept_KY: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Change a slice of the logits to what sampling drew from; return what `Penalised.apply` does."""
    penalty = None if penalised is None else penalised.apply(logits_KW, 0, start)
    if kept_KY is not None:
        hide_others(logits_KW, kept_KY, start)
    return penalty


def _slices(
    hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, change: LogitChange, penalised: Penalised | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first word and the logits [K, W] of each slice of the vocabulary; all slices share one buffer.

    With penalties they are in float32: rounding after them would move equal logits in the same direction every time.
    """
    num_words = weight_VH.size(0)
    buffer = hidden_KH.new_empty(hidden_KH.size(0) * min(WORDS, num_words))
    for start in range(0, num_words, WORDS):
        rows_WH = weight_VH[start : start + WORDS]
        logits_KW = buffer[: hidden_KH.size(0) * len(rows_WH)].view(-1, len(rows_WH))
        if bias_V is None:
            torch.mm(hidden_KH, rows_WH.T, out=logits_KW)
        else:
            torch.addmm(bias_V[start : start + WORDS], hidden_KH, rows_WH.T, out=logits_KW)
        yield start, change.apply(logits_KW) if penalised is None else change.apply(logits_KW).float()


def _add_product(sum_KH: Tensor, left_KW: Tensor, right_WH: Tensor) -> None:
    """`sum_KH += left_KW @ right_WH`, without rounding the product to the dtype of its factors."""
    if sum_KH.device.type == "cuda" and left_KW.dtype != torch.float32:
        torch.addmm(sum_KH, left_KW, right_WH, out_dtype=torch.float32, out=sum_KH)
    else:
        sum_KH.addmm_(left_KW.float(), right_WH.float())


def _passes(tensor: Tensor) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two passes over a slice of the logits, for the device of `tensor`."""
    if tensor.device.type != "cuda":
        return fold_plain.fold, fold_plain.unfold
    from grpo_workload.policy.logprobs.fold_triton import fold, unfold  # CPU builds of torch lack Triton

    return fold, unfold
