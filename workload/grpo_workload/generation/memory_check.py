"""Checks, before vLLM is loaded, that a colocated engine and training fit on one GPU. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SAVED_BY_4_BITS = {dtype: size - 0.5 - (1 + 4 / 256) / 64 for dtype, size in BYTES.items()}
"""Bytes for each parameter. 64 have a constant of one byte, and 256 of these one of four."""
MOST = 0.9  # largest share of a GPU that generation.gpuMemoryUtilization allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that training takes on one GPU."""

    weights: int  # bytes of the weights in model.dtype, the reference model's included
    optimizer: int  # bytes of the float32 weights, AdamW's two moments, and gradients that DeepSpeed never frees
    gradients: int  # bytes of gradients that exist from the backward pass to the optimizer's step
    away: int = 0  # bytes of `optimizer` that are in host memory except during its step

    @property
    def states(self) -> int:
        """Bytes that are always on the GPU, also while the engine generates."""
        return self.weights + self.optimizer - self.away

    @property
    def most(self) -> int:
        """Bytes on the GPU during the optimizer's step."""
        return self.weights + self.optimizer + self.gradients


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

    Left out, since they depend on lengths, layers and libraries: activations, logits, buckets of reductions and gathers
    (0.1 to 0.5 GB), the memory of CUDA and NCCL themselves, and fragmentation. So a refused setting cannot work, and an
    accepted one may still be tight.
    """
    stage, offload = config.parallelism.zero_stage, config.parallelism.offload_optimizer
    size, dtype = BYTES[config.model.dtype], config.model.dtype
    if num_adapted is None:
        present = num_parameters * (2 if config.training.beta > 0 else 1)
    else:  # the reference is the model without its adapters
        present, num_parameters = num_parameters + num_adapted, num_adapted
    weights = size * (math.ceil(present / world_size) if stage == 3 else present)
    weights -= int(num_quantized * SAVED_BY_4_BITS[dtype])
    share = math.ceil(num_parameters / world_size)
    if offload == "cpu":
        return Footprint(weights=weights, optimizer=0, gradients=0)
    if config.parallelism.optimizer_dtype == "bfloat16":
        states, kept, gradients = _half_states(stage, share=share, num_parameters=num_parameters)
    elif stage == 0:
        states, kept, gradients = (8 if dtype == "float32" else 12) * num_parameters, 0, size * num_parameters
    elif stage == 1 and dtype == "bfloat16":  # DeepSpeed's optimizer keeps a second copy of all gradients, in float32
        states, kept, gradients = 12 * share, 4 * num_parameters, size * num_parameters
    elif stage == 3:  # DeepSpeed never frees this rank's share of the gradients
        states, kept, gradients = 12 * share, 4 * share, 0
    else:
        states, kept, gradients = 12 * share, 0, 4 * share
    return Footprint(
        weights=weights, optimizer=states + kept, gradients=gradients, away=states if offload == "generating" else 0
    )


def _half_states(stage: int, *, share: int, num_parameters: int) -> tuple[int, int, int]:
    """Return bytes of bfloat16 states, of gradients that are never freed, and of other gradients.

    From stage 1 on the states include a copy of the weights that this rank updates.
    """
    match stage:
        case 0:
            return 4 * num_parameters, 0, 2 * num_parameters
        case 1:
            return 6 * share, 0, 2 * num_parameters
        case 2:
            return 6 * share, 0, 2 * share
        case _:
            return 6 * share, 2 * share, 0


def check_room(
    config: TrainerConfig,
    *,
    total: int,
    num_parameters: int,
    world_size: int,
    num_adapted: int | None = None,
    num_quantized: int = 0,
) -> None:
    """Refuse a share of the GPU, or a cache size, that leaves too little for training or for the engine's own weights.

    Training's states stay on the GPU while the engine is awake, except those that parallelism.offloadOptimizer
    generating moves away. An engine that sleeps during training (levels 1 and 2) counts as nothing then, so gradients,
    and states that return for the optimizer's step, may use its memory. An engine that does not sleep keeps all of its
    memory.

    Args:
        config: the job's settings, with topology Colocate.
        total: bytes of the GPU.
        num_parameters: number of parameters of the whole model, without adapters; tied ones count once.
        world_size: number of ranks that ZeRO partitions over.
        num_adapted: number of parameters that LoRA trains; None without LoRA.
        num_quantized: how many of `num_parameters` the trainer has in 4 bits; the engine has none.

    Raises:
        ConfigError: names generation.gpuMemoryUtilization, or generation.kvCacheMemory if that is set, the bytes, and
            a value that would work.
    """
    generation = config.generation
    training = training_footprint(
        config,
        num_parameters=num_parameters,
        world_size=world_size,
        num_adapted=num_adapted,
        num_quantized=num_quantized,
    )
    room = total - (training.most if generation.sleep_level == 0 else training.states) if training.most <= total else 0
    weights = math.ceil(BYTES[config.model.dtype] * num_parameters / generation.tensor_parallel)
    cache = generation.kv_cache_bytes
    engine = int(generation.gpu_share * total) if cache is None else weights + cache
    if weights < engine <= room:
        return
    if cache is None:
        asked = f"generation.gpuMemoryUtilization: {generation.gpu_share} of the GPU is {_gib(engine)} for vLLM"
    else:
        asked = f"generation.kvCacheMemory: {generation.kv_cache_memory} and the weights are {_gib(engine)} for vLLM"
    raise ConfigError(
        f"{asked}, whose weights take {_gib(weights)}; training takes {_gib(training.weights)} for weights, "
        f"{_gib(training.optimizer)} for optimizer states{_meanwhile(training)} and {_gib(training.gradients)} for "
        f"gradients; the GPU has {_gib(total)}. "
        f"{_remedy(config, room=room, weights=weights, total=total, by_share=cache is None)}"
    )


def num_parameters(parameters: Iterable[Any]) -> int:
    """Return the number of elements of a torch module's parameters; under ZeRO-3 over all ranks."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def _remedy(config: TrainerConfig, *, room: int, weights: int, total: int, by_share: bool) -> str:
    share, cache = math.floor(min(MOST, room / total) * 100) / 100, (room - weights) // 2**20
    if by_share and share * total > weights:
        return f"{share} would work"
    if not by_share and cache > 0:
        return f"{cache}Mi would work"
    if config.lora is None:
        smaller = "parallelism.zeroStage 3, "
    else:
        smaller = "" if config.lora.load_in_4bit else "parallelism.zeroStage 3, lora.loadIn4Bit, "
    return (
        f"No value would work; {smaller}parallelism.offloadOptimizer cpu (or generating, where training "
        "alone fits), a higher generation.tensorParallel, or more ranks would make room"
    )


def _meanwhile(training: Footprint) -> str:
    return f" ({_gib(training.away)} of them in host memory while vLLM generates)" if training.away else ""


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
