"""Exchanges in a sequence group during a pass: tokens for heads and back, and values of completion tokens.

Between its layers a rank has some tokens of a micro-batch; in attention, all tokens of some heads (DeepSpeed-Ulysses,
arXiv:2309.14509). Tokens and query heads are divided as evenly as they can be, and each rank gets the key heads that
its query heads see: so any number of both works.

Shapes: N tokens of the micro-batch, O those of this rank; X heads of a tensor, Y those of this rank; D head size; K
completion tokens, P those of this rank, V values of each.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_workload.algorithm.sequence_part import shares, spans
from grpo_workload.ranks.sequence_group import SequenceGroup


class Exchange:
    """The tokens of one micro-batch, divided over the ranks of a group."""

    def __init__(self, group: SequenceGroup, num_tokens: int) -> None:
        self.group, self.tokens = group, shares(num_tokens, group.size)

    def own_heads(self, num_heads: int) -> slice:
        """Return the query heads of this rank."""
        return spans(num_heads, self.group.size)[self.group.place]

    def to_heads(self, query_OXD: Tensor, key_OXD: Tensor, value_OXD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens of this rank's heads [N, Y, D], with as many query heads for each key head; collective."""
        num_heads, num_keys = query_OXD.size(1), key_OXD.size(1)
        apply = cast(Any, _ToHeads.apply)
        query, key, value = apply(self, query_OXD, key_OXD, value_OXD)
        own, each = self.own_heads(num_heads), num_heads // num_keys
        seen = [head // each for head in range(own.start, own.stop)]
        counts = {seen.count(head) for head in seen}
        if len(counts) > 1:  # the kernel wants the same number of query heads for each key head
            places = torch.tensor([head - seen[0] for head in seen], device=key.device)
            key, value = key.index_select(1, places), value.index_select(1, places)
        return query, key, value

    def to_tokens(self, output_NYD: Tensor, num_heads: int) -> Tensor:
        """Return all heads of this rank's tokens [O, X, D]; collective."""
        return cast(Tensor, cast(Any, _ToTokens.apply)(self, output_NYD, num_heads))

    def _heads(self, num_queries: int, num_keys: int) -> tuple[list[slice], list[slice]]:
        """Return the query heads of each rank, and the key heads that these see."""
        each = num_queries // num_keys
        queries = spans(num_queries, self.group.size)
        return queries, [slice(one.start // each, -(-one.stop // each)) for one in queries]

    def _spread(self, tensor_OXD: Tensor, heads: list[slice]) -> Tensor:
        """Give each rank its heads of this rank's tokens."""
        count, _, size = tensor_OXD.shape
        own = _width(heads[self.group.place])
        sent = torch.cat([tensor_OXD[:, one].flatten() for one in heads])
        got = tensor_OXD.new_empty(sum(self.tokens), own, size)
        dist.all_to_all_single(
            got.view(-1),
            sent,
            [tokens * own * size for tokens in self.tokens],
            [count * _width(one) * size for one in heads],
            group=self.group.handle,
        )
        return got

    def _collect(self, tensor_NYD: Tensor, heads: list[slice], num_heads: int) -> Tensor:
        """Give each rank its tokens of this rank's heads; what several ranks have of one head is added up."""
        _, own, size = tensor_NYD.shape
        count = self.tokens[self.group.place]
        sizes = [count * _width(one) * size for one in heads]
        got = tensor_NYD.new_empty(sum(sizes))
        dist.all_to_all_single(
            got,
            tensor_NYD.reshape(-1),
            sizes,
            [tokens * own * size for tokens in self.tokens],
            group=self.group.handle,
        )
        parts = [part.view(count, _width(one), size) for part, one in zip(torch.split(got, sizes), heads, strict=True)]
        if sum(map(_width, heads)) == num_heads:
            return torch.cat(parts, dim=1)
        dtype = torch.promote_types(got.dtype, torch.float32)
        sums = got.new_zeros(count, num_heads, size, dtype=dtype)
        for part, one in zip(parts, heads, strict=True):
            sums[:, one] += part
        return sums.to(got.dtype)


class _ToHeads(torch.autograd.Function):
    """The three tensors in one function, so that the ranks' collectives have one order in the backward pass, too."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.counts = exchange, (query.size(1), key.size(1))
        queries, keys = exchange._heads(*ctx.counts)
        return exchange._spread(query, queries), exchange._spread(key, keys), exchange._spread(value, keys)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        num_queries, num_keys = ctx.counts
        queries, keys = ctx.exchange._heads(num_queries, num_keys)
        query, key, value = gradients
        collect = ctx.exchange._collect
        return None, collect(query, queries, num_queries), collect(key, keys, num_keys), collect(value, keys, num_keys)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, output: Tensor, num_heads: int) -> Tensor:
        ctx.exchange, ctx.heads = exchange, spans(num_heads, exchange.group.size)
        return exchange._collect(output, ctx.heads, num_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.exchange._spread(gradients[0], ctx.heads), None


def of_all(values_PV: Tensor, own_P: Tensor, count: int, group: SequenceGroup) -> Tensor:
    """Return the values [K, V] of all ranks of a group; collective. Each rank's own have a gradient.

    So the gradient of a loss that all ranks of the group compute alike is divided over them: they add up to it once.

    Args:
        values_PV: this rank's values; any beyond those of `own_P` do not count.
        own_P: their places among those of all ranks.
        count: K.
        group: the ranks.
    """
    return cast(Tensor, cast(Any, _OfAll.apply)(values_PV, own_P, count, group))


class _OfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_PV: Tensor, own_P: Tensor, count: int, group: SequenceGroup) -> Tensor:
        ctx.save_for_backward(own_P)
        ctx.shape = values_PV.shape
        values_KV = values_PV.new_zeros(count, values_PV.size(1))
        values_KV[own_P] = values_PV[: len(own_P)]
        dist.all_reduce(values_KV, group=group.handle)
        return values_KV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (own_P,) = ctx.saved_tensors
        gradient_PV = gradients[0].new_zeros(ctx.shape)
        gradient_PV[: len(own_P)] = gradients[0][own_P]
        return gradient_PV, None, None, None


def _width(heads: slice) -> int:
    return int(heads.stop - heads.start)
