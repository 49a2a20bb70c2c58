"""Two functions of flash-attn 2 by PyTorch's kernels, for trainers that pack sequences with it.

flash-attn has no wheel for the newest torch. `install` writes a package of that name, which forwards to this module.
Its parts in Triton are found behind it, if they are on the path (`pack.sh` has one).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.vs_trl.varlen_attention import Attention

VERSION = "2.8.3"


def install(folder: Path) -> None:
    """Write the package `flash_attn` into `folder`, which then belongs on the path."""
    info = folder / f"flash_attn-{VERSION}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\n")
    (info / "RECORD").write_text("flash_attn/__init__.py,,\nflash_attn/bert_padding.py,,\n")
    (package := folder / "flash_attn").mkdir(exist_ok=True)
    names = "flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache"
    (package / "__init__.py").write_text(
        f"from pkgutil import extend_path\n\nfrom benchmarks.vs_field.flash_attn import {names}\n\n"
        f'__version__ = "{VERSION}"\n__path__ = extend_path(__path__, __name__)\n'
    )
    names = "index_first_axis, pad_input, unpad_input"
    (package / "bert_padding.py").write_text(
        f"from einops import rearrange\n\nfrom benchmarks.vs_field.flash_attn import {names}\n"
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> Any:
    """Attention [N, H, D] of packed sequences, each token's to those before it."""
    import torch

    assert dropout_p == 0.0
    return Attention.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        int(max_seqlen_q),
        int(max_seqlen_k),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(-1, -1),
    )


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, **_: Any
) -> Any:
    """Attention [B, T, H, D] of a batch without padding."""
    from torch.nn.functional import scaled_dot_product_attention

    assert dropout_p == 0.0
    query, key, value = (one.transpose(1, 2) for one in (q, k, v))
    out = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> Any:
    """Refused: transformers imports it, and training has no such cache."""
    raise NotImplementedError("flash_attn_with_kvcache: trainers here sample with vLLM")


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """Return the tokens that a mask [B, T] keeps, their places, where sequences begin, the longest, and all lengths."""
    import torch
    from torch.nn.functional import pad

    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    places = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    begins = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[places], places, begins, int(lengths.max()), lengths


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """Put tokens [N, ...] back to their places of [B, T, ...]."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return out.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(tensor: Any, indices: Any) -> Any:
    """Return rows of a tensor."""
    return tensor[indices]
