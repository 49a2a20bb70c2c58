"""Bytes that DeepSpeed holds on each rank: weights, masters, moments, gradients. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grpo_spec.deepspeed_config import BUCKET_ELEMENTS
from grpo_spec.optimizer import INT8_MOMENTS
from grpo_spec.trainer import TrainerConfig

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SAVED_BY_4_BITS = {dtype: size - 0.5 - (1 + 4 / 256) / 64 for dtype, size in BYTES.items()}
"""Bytes for each parameter. 64 have a constant of one byte, and 256 of these one of four."""
LIVE_ELEMENTS = 1_000_000_000
"""Elements that ZeRO-3 holds gathered at once: DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance."""
PREFETCHED_ELEMENTS = 50_000_000  # its stage3_prefetch_bucket_size
UNREDUCED_ELEMENTS = 500_000_000  # of gradients that its engine sums at once without ZeRO


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that training takes on one GPU."""

    weights: int  # in model.dtype
    reference: int  # the same of the reference model
    masters: int  # the copies of the weights that AdamW updates
    moments: int  # AdamW's
    kept: int  # gradients that DeepSpeed never frees
    gradients: int  # gradients that exist from the backward pass to the optimizer's step
    away: int = 0  # bytes of masters and moments that are in host memory except during the optimizer's step

    @property
    def states(self) -> int:
        """Bytes that are always on the GPU, also while the engine generates."""
        return self.weights + self.reference + self.masters + self.moments + self.kept - self.away

    @property
    def most(self) -> int:
        """Bytes on the GPU during the optimizer's step."""
        return self.states + self.away + self.gradients


def training_footprint(
    config: TrainerConfig,
    *,
    num_parameters: int,
    world_size: int,
    num_adapted: int | None = None,
    num_quantized: int = 0,
) -> Footprint:
    """Return what DeepSpeed holds on each GPU after its first step; with LoRA it trains `num_adapted` extra parameters.

    Of the others, `num_quantized` are in 4 bits.

    Measured in DeepSpeed 0.19 over two ranks, for every stage in bfloat16 and float32. float16 is assumed to equal
    bfloat16, except at stage 1, where it is assumed to equal stage 2.
    """
    stage, offload = config.parallelism.zero_stage, config.parallelism.offload_optimizer
    size, dtype = BYTES[config.model.dtype], config.model.dtype
    divided = world_size if stage == 3 else 1
    weights = size * math.ceil((num_parameters + (num_adapted or 0)) / divided)
    weights -= int(num_quantized * SAVED_BY_4_BITS[dtype])
    # With LoRA the reference is the model without its adapters.
    has_reference = config.training.beta > 0 and num_adapted is None
    reference = size * math.ceil(num_parameters / divided) if has_reference else 0
    if num_adapted is not None:
        num_parameters = num_adapted
    share, masters, kept = math.ceil(num_parameters / world_size), 4, 0
    if offload == "cpu":
        masters = moments = gradients = share = 0
    elif config.parallelism.optimizer_dtype == "bfloat16":
        masters, moments = (2 if stage else 0), 4
        kept, gradients = [(0, 2 * num_parameters), (0, 2 * num_parameters), (0, 2 * share), (2 * share, 0)][stage]
    elif stage == 0:
        masters, moments, gradients = (0 if dtype == "float32" else 4), 8, size * num_parameters
    elif stage == 1 and dtype == "bfloat16":  # DeepSpeed's optimizer keeps a second copy of all gradients, in float32
        moments, kept, gradients = 8, 4 * num_parameters, size * num_parameters
    elif stage == 3:  # DeepSpeed never frees this rank's share of the gradients
        moments, kept, gradients = 8, 4 * share, 0
    else:
        moments, gradients = 8, 4 * share
    held = share if stage else (num_parameters if share else 0)
    moments = math.ceil((INT8_MOMENTS if config.parallelism.optimizer_dtype == "int8" else moments) * held)
    return Footprint(
        weights=weights,
        reference=reference,
        masters=masters * held,
        moments=moments,
        kept=kept,
        gradients=gradients,
        away=masters * held + moments if offload == "generating" else 0,
    )


def bucket_bytes(config: TrainerConfig, *, num_trained: int, world_size: int) -> int:
    """Return bytes of DeepSpeed's buffers for gradients on their way between ranks (`spec.deepspeed_config`)."""
    stage, size = config.parallelism.zero_stage, BYTES[config.model.dtype]
    if stage == 0:
        return size * min(num_trained, UNREDUCED_ELEMENTS) if world_size > 1 else 0
    return size * min(num_trained, BUCKET_ELEMENTS) * (2 if stage == 3 else 1)  # overlap_comm: one fills, one is sent


def live_bytes(config: TrainerConfig, *, num_parameters: int, world_size: int) -> int:
    """Return bytes of the weights that ZeRO-3 has gathered in the middle of a pass; 0 at other stages."""
    if config.parallelism.zero_stage < 3:
        return 0
    others = num_parameters - num_parameters // world_size  # a single rank gathers nothing: it uses its partition
    return BYTES[config.model.dtype] * min(others, LIVE_ELEMENTS + PREFETCHED_ELEMENTS)


def num_parameters(parameters: Iterable[Any]) -> int:
    """Return the number of elements of a torch module's parameters; under ZeRO-3 over all ranks."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
