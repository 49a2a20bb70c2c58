"""The few collectives that ranks use outside of DeepSpeed."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import deepspeed
import torch
import torch.distributed as dist
from accelerate import PartialState

from grpo_spec.contract import Device

T = TypeVar("T")


def join(device: Device, timeout_seconds: int) -> torch.device:
    """Join the process group of all ranks and return this rank's device. Call it once."""
    if device == Device.CPU:
        # DeepSpeed would compile an all-reduce over shared memory, which is of no use between pods, takes a minute, and
        # needs a compiler in the image.
        deepspeed.ops.__compatible_ops__ = {}
        # Otherwise gloo's threads can turn any exit code into SIGABRT. Not for NCCL: it would wait for dead ranks.
        atexit.register(leave)
    backend = "gloo" if device == Device.CPU else "nccl"
    own: torch.device = PartialState(backend=backend, timeout=timedelta(seconds=timeout_seconds)).device
    return own


def on_main(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only. Return its result, or raise its exception, on all ranks.

    Both must pickle. Exceptions do if they are built in or take only their message.
    """
    outcome: list[T | Exception | None] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[1], Exception):
        raise outcome[1]
    return cast(T, outcome[0])


def gather(value: T, group: Any = None) -> list[T]:
    """Return the `value` of every rank, or of those of torch's process group `group`, in rank order. It must pickle."""
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return cast(list[T], values)


def leave() -> None:
    """Destroy the process group, unless an engine's shutdown did. Its threads may crash an interpreter that ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
