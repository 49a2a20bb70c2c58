"""Leaves no trace of a step whose gradients were dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@contextmanager
def undisturbed(deepspeed_engine: Any) -> Iterator[None]:
    """Within it, a step that is skipped changes neither DeepSpeed's counters nor its loss scale nor random numbers."""
    counters = {name: getattr(deepspeed_engine, name) for name in _COUNTERS}
    scaler = vars(deepspeed_engine.optimizer.loss_scaler) if deepspeed_engine.fp16_enabled() else {}
    before = dict(scaler)
    device = deepspeed_engine.device
    with torch.random.fork_rng([device] if torch.device(device).type == "cuda" else []):
        yield
    scaler.update(before)
    vars(deepspeed_engine).update(counters)
