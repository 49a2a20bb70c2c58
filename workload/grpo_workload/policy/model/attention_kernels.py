"""The arithmetic of causal attention over packed sequences: by PyTorch's kernel for GPUs, or one sequence at a time.

PyTorch's kernel is FlashAttention 2. For long sequences cuDNN's takes some 0.6 of its time on H100s
(`benchmarks/training/attention.py`), but takes one sequence at a time, and prepares itself for each new length.

The queries of a sequence are its last tokens, and may be fewer than its keys. Shapes: S sequences, N queries, M keys of
all of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

_ROWS = 16_384
"""Gradients that are summed at once: more would take their memory twice over in float32."""


LONG = 16_384
"""Mean number of tokens of the sequences from which on cuDNN computes their attention."""

_STEP = 1024
"""cuDNN's lengths are multiples of this: it keeps what it has prepared for each length until the process ends."""

_CUDNN_HEAD_SIZE = 128  # of its kernel for a backward pass


class Bounds(NamedTuple):
    """The offsets at which sequences begin."""

    starts: Tensor  # int32 [S + 1]
    longest: int


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: Bounds,
    of_keys: Bounds,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute attention by the kernel, which aligns the last query of a sequence with its last key."""
    # (-1, 0) is causal; the kernel's window does not count the token itself.
    sides = (-1, 0) if window is None else (window - 1, 0)
    # The kernel takes one head size. Values of latent attention (MLA) have a smaller one than keys.
    size = value.size(-1)
    if size < query.size(-1):
        value = torch.nn.functional.pad(value, (0, query.size(-1) - size))
    output = cast(
        Tensor,
        varlen_attn(
            query,
            key,
            value,
            of_queries.starts,
            of_keys.starts,
            of_queries.longest,
            of_keys.longest,
            scale=scale,
            window_size=sides,
            enable_gqa=True,
        ),
    )
    return output[..., :size]


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: Bounds,
    of_keys: Bounds,
    scale: float | None,
    window: int | None,
    multiple: int = 1,
) -> Tensor:
    """Compute attention sequence by sequence, in any precision and on any device.

    Sequences with as many queries as keys are padded to a multiple of `multiple` tokens, which none of them sees.
    """
    rows = []
    places = (pairwise(bounds.starts.tolist()) for bounds in (of_queries, of_keys))
    for queries, keys in zip(*places, strict=True):
        one = query[slice(*queries)].transpose(0, 1).unsqueeze(0)
        seen, values = (tensor[slice(*keys)].transpose(0, 1).unsqueeze(0) for tensor in (key, value))
        is_plain = one.size(2) == seen.size(2) and (window is None or seen.size(2) <= window)
        mask = None if is_plain else _band(one.size(2), seen.size(2), window, query.device)
        count = one.size(2)
        if is_plain and count % multiple:
            # Not F.pad, whose backward pass copies gradients. What is padded takes the place of what a layer keeps.
            one, seen, values = (_lengthened(tensor, -count % multiple) for tensor in (one, seen, values))
        row = scaled_dot_product_attention(
            one, seen, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        rows.append(row.squeeze(0)[:, :count].transpose(0, 1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _lengthened(tensor_1HND: Tensor, by: int) -> Tensor:
    shape = (*tensor_1HND.shape[:2], by, tensor_1HND.size(3))
    return torch.cat([tensor_1HND, tensor_1HND.new_zeros(shape)], dim=2)


def by_cudnn(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None) -> Tensor:
    """Compute attention of long sequences, each with as many queries as keys, by cuDNN; see `takes_cudnn`."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return one_by_one(query, key, value, bounds, bounds, scale, None, multiple=_STEP)


def takes_cudnn(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, window: int | None) -> bool:
    """Return whether cuDNN computes this attention, and in less time than `varlen`."""
    is_long = len(query) >= LONG * (len(bounds.starts) - 1)
    if not is_long or query.device.type != "cuda" or (window is not None and window < bounds.longest):
        return False
    if query.size(-1) > _CUDNN_HEAD_SIZE or value.size(-1) != query.size(-1):
        return False
    if torch.cuda.get_device_capability(query.device)[0] not in (9, 10):
        return False
    one, seen, values = (tensor.detach().transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    asked = torch.backends.cuda.SDPAParams(one, seen, values, None, 0.0, True, True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return bool(torch.backends.cuda.can_use_cudnn_attention(asked))


def _band(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    keys = torch.arange(num_keys, device=device)
    distance = keys[num_keys - num_queries :].unsqueeze(1) - keys
    return (distance >= 0) & (distance < (num_keys if window is None else window))


def copied(rows_N: Tensor, places_M: Tensor) -> Tensor:
    """Return `rows_N[places_M]`; gradients of a row's copies are summed in float32."""
    return cast(Tensor, _Copied.apply(rows_N, places_M))  # type: ignore[no-untyped-call]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_N: Tensor, places_M: Tensor) -> Tensor:
        ctx.places_M, ctx.count = places_M, len(rows_N)
        return rows_N.index_select(0, places_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_M,) = gradients
        dtype = torch.promote_types(gradient_M.dtype, torch.float32)
        sums_N = gradient_M.new_zeros(ctx.count, *gradient_M.shape[1:], dtype=dtype)
        for start in range(0, len(gradient_M), _ROWS):
            part = slice(start, start + _ROWS)
            sums_N.index_add_(0, ctx.places_M[part], gradient_M[part].to(dtype))
        return sums_N.to(gradient_M.dtype), None
