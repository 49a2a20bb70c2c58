"""PyTorch's kernel for packed sequences in place of the kernel of the hub that TRL loads."""

from __future__ import annotations

from typing import Any


class Attention:
    """The functions of its kernel that TRL calls, computed by PyTorch."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Any,
        key: Any,
        value: Any,
        starts: Any,
        key_starts: Any,
        longest: int,
        longest_key: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Any:
        """Attention [N, H, D] of segments to their paths, aligned at their ends."""
        assert causal
        assert window_size == (-1, -1)
        from torch.nn.attention.varlen import varlen_attn

        if query.is_cuda:
            return varlen_attn(
                query,
                key,
                value,
                starts,
                key_starts,
                longest,
                longest_key,
                scale=softmax_scale,
                window_size=(-1, 0),
                enable_gqa=True,
            )
        import torch
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        parts = []
        for index in range(len(starts) - 1):
            part, path = slice(*starts[index : index + 2].tolist()), slice(*key_starts[index : index + 2].tolist())
            one = (query[part], key[path], value[path])
            queries, keys, values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in one)
            mask = causal_lower_right(queries.size(-2), keys.size(-2))
            out = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)
