"""Whether a colocated engine fits beside training on one GPU: arithmetic, done before vLLM is loaded. Torch-free and pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grpo_workload.config import TrainerConfig

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MOST = 0.9  # of a GPU, as the field allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of training on one GPU."""

    weights: int  # in the training type, with those of the reference model
    optimizer: int  # float32 copies of the weights and AdamW's two moments, and gradients that DeepSpeed never frees
    gradients: int  # from the backward pass to the optimizer's step
    away: int = 0  # of the optimizer's: in the host's memory but for its step

    @property
    def states(self) -> int:
        """What is there all the time, also while the engine generates."""
        return self.weights + self.optimizer - self.away

    @property
    def most(self) -> int:
        """What is there at the optimizer's step."""
        return self.weights + self.optimizer + self.gradients


def training_footprint(config: TrainerConfig, *, num_parameters: int, world_size: int, num_adapted: int | None = None) -> Footprint:
    """What DeepSpeed holds on each GPU after its first step: with LoRA, `num_adapted` parameters are trained beside the model's own.

    Counted in DeepSpeed 0.19 over two ranks, for every stage in bfloat16 and float32; float16 is taken to be like bfloat16,
    and at stage 1 like stage 2.

    Not counted, since they depend on lengths, layers and libraries: activations, logits, buckets that are reduced or gathered (0.1 to 0.5
    GB), CUDA's and NCCL's own memory, and fragments. So what is refused cannot work, and what is accepted may still be tight.
    """
    stage, offload = config.parallelism.zero_stage, config.parallelism.offload_optimizer
    size, dtype = BYTES[config.model.dtype], config.model.dtype
    if num_adapted is None:
        present = num_parameters * (2 if config.training.beta > 0 else 1)
    else:  # the reference is the model without its adapters
        present, num_parameters = num_parameters + num_adapted, num_adapted
    weights = size * (math.ceil(present / world_size) if stage == 3 else present)
    share = math.ceil(num_parameters / world_size)
    if offload == "cpu":
        return Footprint(weights=weights, optimizer=0, gradients=0)
    if config.parallelism.optimizer_dtype == "bfloat16":
        states, kept, gradients = _half_states(stage, share=share, num_parameters=num_parameters)
    elif stage == 0:
        states, kept, gradients = (8 if dtype == "float32" else 12) * num_parameters, 0, size * num_parameters
    elif stage == 1 and dtype == "bfloat16":  # its optimizer keeps all gradients in float32, beside those of the backward pass
        states, kept, gradients = 12 * share, 4 * num_parameters, size * num_parameters
    elif stage == 3:  # keeps its share of the gradients
        states, kept, gradients = 12 * share, 4 * share, 0
    else:
        states, kept, gradients = 12 * share, 0, 4 * share
    return Footprint(weights=weights, optimizer=states + kept, gradients=gradients, away=states if offload == "generating" else 0)


def _half_states(stage: int, *, share: int, num_parameters: int) -> tuple[int, int, int]:
    """States in bfloat16, gradients that are kept, and others; from stage 1 on there is a copy of the weights that are updated."""
    match stage:
        case 0:
            return 4 * num_parameters, 0, 2 * num_parameters
        case 1:
            return 6 * share, 0, 2 * num_parameters
        case 2:
            return 6 * share, 0, 2 * share
        case _:
            return 6 * share, 2 * share, 0


def check_room(config: TrainerConfig, *, total: int, num_parameters: int, world_size: int, num_adapted: int | None = None) -> None:
    """Refuse a share of the GPU, or a cache, that leaves training or the engine's own weights too little.

    Training's states stay on the GPU while the engine is awake, but for those that parallelism.offloadOptimizer generating takes away. An
    engine that sleeps while it trains (levels 1 and 2) is counted as nothing then, so that gradients, and states that come back for the
    optimizer's step, may use its memory; one that does not sleep keeps all of it.

    Args:
        config: the job's; topology Colocate.
        total: bytes of the GPU.
        num_parameters: of the whole model, tied ones once, without adapters.
        world_size: ranks that ZeRO partitions over.
        num_adapted: parameters that LoRA trains, where it does.

    Raises:
        ValueError: names generation.gpuMemoryUtilization, or generation.kvCacheMemory where it is set, the bytes, and what would work.
    """
    generation = config.generation
    training = training_footprint(config, num_parameters=num_parameters, world_size=world_size, num_adapted=num_adapted)
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
    raise ValueError(
        f"{asked}, whose weights take {_gib(weights)}; training takes {_gib(training.weights)} for weights, {_gib(training.optimizer)} for "
        f"optimizer states{_meanwhile(training)} and {_gib(training.gradients)} for gradients; the GPU has {_gib(total)}. "
        f"{_remedy(room=room, weights=weights, total=total, by_share=cache is None)}"
    )


def num_parameters(parameters: Iterable[Any]) -> int:
    """Elements of a torch module's parameters; under ZeRO-3 those of all ranks."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def _remedy(*, room: int, weights: int, total: int, by_share: bool) -> str:
    share, cache = math.floor(min(MOST, room / total) * 100) / 100, (room - weights) // 2**20
    if by_share and share * total > weights:
        return f"{share} would work"
    if not by_share and cache > 0:
        return f"{cache}Mi would work"
    return (
        "No value would work; parallelism.zeroStage 3, parallelism.offloadOptimizer cpu (or generating, where training alone fits), a "
        "higher generation.tensorParallel, or more ranks would make room"
    )


def _meanwhile(training: Footprint) -> str:
    return f" ({_gib(training.away)} of them in the host's memory while vLLM generates)" if training.away else ""


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
