"""Triton kernels for the two passes of `logprobs` over a slice of the logits; each reads the slice once.

A program works on one token.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _fold(logits, places, state, scale, num_words, num_tokens, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * num_words
    place = tl.load(places + token)
    largest = tl.load(state + token)
    total = tl.load(state + num_tokens + token)
    weighted = tl.load(state + 2 * num_tokens + token)
    for start in range(0, num_words, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = words < num_words
        values = tl.load(row + words, mask=inside, other=-float("inf")).to(tl.float32) * scale
        before = largest
        largest = tl.maximum(largest, tl.max(values, axis=0))
        shrunk = tl.exp(before - largest)
        weights = tl.exp(values - largest)
        total = total * shrunk + tl.sum(weights, axis=0)
        weighted = weighted * shrunk + tl.sum(tl.where(inside, weights * values, 0.0), axis=0)
    tl.store(state + token, largest)
    tl.store(state + num_tokens + token, total)
    tl.store(state + 2 * num_tokens + token, weighted)
    if (place >= 0) & (place < num_words):
        tl.store(state + 3 * num_tokens + token, tl.load(row + place).to(tl.float32) * scale)


@triton.jit
def _unfold(
    logits,
    places,
    lse,
    gradient,
    entropy,
    entropy_gradient,
    scale,
    num_words,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < num_words
    row = logits + token * num_words + words
    values = tl.load(row, mask=inside, other=0.0).to(tl.float32) * scale
    logprobs = values - tl.load(lse + token)
    probabilities = tl.exp(logprobs)
    is_target = (words == tl.load(places + token)).to(tl.float32)
    change = (is_target - probabilities) * (tl.load(gradient + token) * scale)
    if HAS_ENTROPY:
        spread = tl.where(probabilities > 0, probabilities * (logprobs + tl.load(entropy + token)), 0.0)
        change -= spread * (tl.load(entropy_gradient + token) * scale)
    tl.store(row, change.to(logits.dtype.element_ty), mask=inside)


def fold(logits_KW: Tensor, places_K: Tensor, scale: float, state_4K: Tensor) -> None:
    """Do what `fold_plain.fold` does."""
    num_tokens, num_words = logits_KW.shape
    _fold[(num_tokens,)](logits_KW, places_K, state_4K, scale, num_words, num_tokens, BLOCK=BLOCK)


def unfold(
    logits_KW: Tensor,
    places_K: Tensor,
    lse_K: Tensor,
    gradient_K: Tensor,
    scale: float,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Do what `fold_plain.unfold` does."""
    num_tokens, num_words = logits_KW.shape
    entropy_K, entropy_gradient_K = entropy or (lse_K, lse_K)  # not read without entropies
    _unfold[(num_tokens, triton.cdiv(num_words, BLOCK))](
        logits_KW,
        places_K,
        lse_K,
        gradient_K,
        entropy_K,
        entropy_gradient_K,
        scale,
        num_words,
        HAS_ENTROPY=entropy is not None,
        BLOCK=BLOCK,
    )
