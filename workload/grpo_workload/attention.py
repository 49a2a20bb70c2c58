"""Causal attention over packed sequences, as an attention function of transformers: no token attends outside its own sequence.

Shapes: N tokens of all sequences of a micro-batch one behind the other, S sequences, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

VARLEN = "varlen"
"""Name under which the function is registered: `model.attention`."""

# Of layers in a configuration's `layer_types`. Others (linear attention, convolutions) carry a state from one sequence into the next.
_PACKABLE = {"full_attention", "sliding_attention", "chunked_attention"}
_CHANGES_SCORES = ("softcap", "s_aux", "position_bias")  # what some models pass, and this function does not know
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)  # before, it needed no word
_MAX_HEAD_SIZE = 256


def register() -> None:
    """Make `attn_implementation="varlen"` known to transformers."""
    AttentionInterface.register(VARLEN, attend)
    # transformers drops the mask of a name that is not registered here, and says nothing; packed sequences need none.
    AttentionMaskInterface.register(VARLEN, lambda *args, **kwargs: None)


def check_packable(model_config: Any) -> None:
    """ValueError for a model with layers that would mix neighbouring sequences; names them."""
    text_config = model_config.get_text_config()
    if others := sorted(set(getattr(text_config, "layer_types", None) or ()) - _PACKABLE):
        raise ValueError(
            f"model: {model_config.model_type} has layers of the types {', '.join(others)}, which would mix sequences that are trained "
            "side by side; models that have attention in every layer work"
        )


def attend(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1GND: Tensor,
    value_1GND: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention [1, N, H, D] of each token to its own sequence up to itself, or to the last `sliding_window` tokens of that.

    Args:
        module: the layer; its own attention parameters are in `others`.
        query_1HND: after rotary embedding.
        key_1GND: after rotary embedding.
        value_1GND: of as many heads as the keys.
        attention_mask: none.
        dropout: none.
        scaling: of the scores; None is 1 / sqrt(D).
        sliding_window: tokens that are attended to, the token itself included.
        cu_seq_lens_q: int32 [S + 1], where each sequence begins, and N.
        max_length_q: tokens of the longest sequence.
        others: what the model passes to any attention function.

    Raises:
        ValueError: sequences are not given, or the model asks for what this function cannot do.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("attention over packed sequences was called without cu_seq_lens_q and max_length_q: sequences would be mixed")
    asked = [name for name in _CHANGES_SCORES if others.get(name) is not None]
    if attention_mask is not None or dropout or asked:
        what = "a mask" if attention_mask is not None else "attention dropout" if dropout else ", ".join(asked)
        raise ValueError(f"model.attention: varlen knows nothing of {what}, which {type(module).__name__} asks for; use sdpa or eager")
    # Not tensor[0], whose backward pass fills a tensor with zeros and copies the gradient into it.
    query_NHD, key_NGD, value_NGD = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_1HND, key_1GND, value_1GND))
    attention = _varlen if _has_kernel(query_NHD) else _one_by_one
    return attention(query_NHD, key_NGD, value_NGD, cu_seq_lens_q, max_length_q, scaling, sliding_window).unsqueeze(0), None


def _has_kernel(query_NHD: Tensor) -> bool:
    if query_NHD.device.type != "cuda" or query_NHD.dtype not in (torch.bfloat16, torch.float16):
        return False
    return query_NHD.size(-1) <= _MAX_HEAD_SIZE and torch.cuda.get_device_capability(query_NHD.device) >= (8, 0)


def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None, window: int | None) -> Tensor:
    # (-1, 0) is causal; a window counts the tokens before the token itself.
    sides = (-1, 0) if window is None else (window - 1, 0)
    return cast(Tensor, varlen_attn(query, key, value, starts, starts, longest, longest, scale=scale, window_size=sides, **_GROUPED))


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None, window: int | None) -> Tensor:
    rows = []
    bounds = starts.tolist()
    for start, end in pairwise(bounds):
        one, keys, values = (tensor[start:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        mask = None if window is None or end - start <= window else _band(end - start, window, query.device)
        row = scaled_dot_product_attention(one, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        rows.append(row.squeeze(0).transpose(0, 1))
    return torch.cat(rows)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device)
    distance = places.unsqueeze(1) - places
    return (distance >= 0) & (distance < window)
