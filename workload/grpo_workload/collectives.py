"""The few things that all ranks tell each other outside of DeepSpeed."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import deepspeed
import torch
import torch.distributed as dist
from accelerate import PartialState

from grpo_workload.contract import Device

T = TypeVar("T")


def join(device: Device, timeout_seconds: int) -> torch.device:
    """Join the process group of all ranks, once; the device of this one."""
    if device == Device.CPU:
        # DeepSpeed would compile an all-reduce over shared memory: a minute, a compiler in the image, and no use between pods.
        deepspeed.ops.__compatible_ops__ = {}
        # However the interpreter ends: an exit code of its own must not become SIGABRT. NCCL's would wait for ranks that are gone.
        atexit.register(leave)
    backend = "gloo" if device == Device.CPU else "nccl"
    own: torch.device = PartialState(backend=backend, timeout=timedelta(seconds=timeout_seconds)).device
    return own


def on_main(action: Callable[[], T]) -> T:
    """What `action` gives on rank 0, which alone runs it; what it raises there is raised on all ranks.

    The result must pickle; of exceptions, the built-in ones and those made of their message alone do.
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


def gather(value: T) -> list[T]:
    """`value` of every rank, in rank order; anything that pickles."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def leave() -> None:
    """End the process group, unless an engine's shutdown has: its threads may crash an interpreter that ends under them."""
    if dist.is_initialized():
        dist.destroy_process_group()
