"""The few things that all ranks tell each other outside of DeepSpeed."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
import torch.distributed as dist

from grpo_workload.loss import LossScale

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """`value` of every rank, in rank order; anything that pickles."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def add_scales(scale: LossScale, device: torch.device) -> LossScale:
    """The sum of all ranks' `scale`."""
    counts = torch.tensor([scale.num_sequences, scale.num_tokens], device=device)
    dist.all_reduce(counts)
    num_sequences, num_tokens = counts.tolist()
    return LossScale(num_sequences=num_sequences, num_tokens=num_tokens)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on any rank: the same answer on all of them."""
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())
