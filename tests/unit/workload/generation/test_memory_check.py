"""The memory that training takes on a GPU, and which shares for vLLM are refused because they leave too little."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.lora import LoraConfig
from grpo_spec.trainer import TrainerConfig
from grpo_workload.generation.memory_check import GIB, check_room, num_parameters, training_footprint


def config(
    dtype: str = "bfloat16", beta: float = 0.0, parallelism: dict[str, Any] | None = None, **generation: Any
) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "model": {"name": "m", "dtype": dtype},
            "dataset": {"name": "d"},
            "rewards": [{"name": "r", "accuracy": {}}],
            "training": {"beta": beta},
            "parallelism": parallelism or {},
            "generation": generation,
        }
    )


# Bytes for each parameter, counted over all tensors of one rank of two after the optimizer's step, and before it, in
# DeepSpeed 0.19.8.
COUNTED = [
    ("bfloat16", 0, 14, 16),
    ("bfloat16", 1, 12, 14),
    ("bfloat16", 2, 8, 10),
    ("bfloat16", 3, 9, 9),
    ("float32", 0, 12, 16),
    ("float32", 1, 10, 12),
    ("float32", 2, 10, 12),
    ("float32", 3, 10, 10),
]


@pytest.mark.parametrize(("dtype", "stage", "after", "before"), COUNTED)
def test_states_and_gradients_are_those_measured_in_deepspeed(dtype: str, stage: int, after: int, before: int) -> None:
    need = training_footprint(config(dtype, parallelism={"zeroStage": stage}), num_parameters=1000, world_size=2)
    assert (need.states, need.states + need.gradients) == (1000 * after, 1000 * before)


@pytest.mark.parametrize(("stage", "after", "before"), [(0, 6, 8), (1, 5, 7), (2, 5, 6), (3, 5, 5)])
def test_states_in_bfloat16_take_half(stage: int, after: int, before: int) -> None:
    settings = config("bfloat16", parallelism={"zeroStage": stage, "optimizerDtype": "bfloat16"})
    need = training_footprint(settings, num_parameters=1000, world_size=2)
    assert (need.states, need.states + need.gradients) == (1000 * after, 1000 * before)


def test_an_offloaded_optimizer_takes_no_memory_and_a_reference_model_doubles_the_weights() -> None:
    offloaded = config(beta=0.1, parallelism={"zeroStage": 3, "offloadOptimizer": "cpu"})
    need = training_footprint(offloaded, num_parameters=1000, world_size=4)
    assert (need.weights, need.optimizer, need.gradients) == (2 * 2 * 250, 0, 0)


# Bytes for each parameter that are in host memory between steps, counted the same way.
AWAY = [
    ({"dtype": "bfloat16"}, {"zeroStage": 0}, 12),
    ({"dtype": "bfloat16"}, {"zeroStage": 1}, 6),
    ({"dtype": "bfloat16"}, {"zeroStage": 2}, 6),
    ({"dtype": "bfloat16"}, {"zeroStage": 3}, 6),
    ({"dtype": "float32"}, {"zeroStage": 0}, 8),
    ({"dtype": "float32"}, {"zeroStage": 1}, 6),
    ({"dtype": "float32"}, {"zeroStage": 2}, 6),
    ({"dtype": "float32"}, {"zeroStage": 3}, 6),
    ({"dtype": "bfloat16"}, {"zeroStage": 0, "optimizerDtype": "bfloat16"}, 4),
    ({"dtype": "bfloat16"}, {"zeroStage": 1, "optimizerDtype": "bfloat16"}, 3),
    ({"dtype": "bfloat16"}, {"zeroStage": 2, "optimizerDtype": "bfloat16"}, 3),
    ({"dtype": "bfloat16"}, {"zeroStage": 3, "optimizerDtype": "bfloat16"}, 3),
]


@pytest.mark.parametrize(("model", "parallelism", "away"), AWAY)
def test_states_that_are_offloaded_while_the_engine_generates_return_for_the_step(
    model: Any, parallelism: Any, away: int
) -> None:
    size = {"num_parameters": 1000, "world_size": 2}
    stay = training_footprint(config(**model, parallelism=parallelism), **size)
    leave = training_footprint(config(**model, parallelism=parallelism | {"offloadOptimizer": "generating"}), **size)
    assert (stay.away, leave.away) == (0, 1000 * away)
    assert leave.states == stay.states - 1000 * away
    assert (leave.weights, leave.most) == (stay.weights, stay.most)


def check(settings: TrainerConfig, *, billions: float = 7, world_size: int = 8, gib: int = 80) -> None:
    check_room(settings, total=gib * GIB, num_parameters=int(billions * 1e9), world_size=world_size)


def test_a_share_that_fits_is_accepted() -> None:
    check(config(gpuMemoryUtilization=0.5))
    check(config())
    check(config(kvCacheMemory="16Gi"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # 7 billion parameters in bf16 over 8 ranks: 13.0 GiB of weights, 9.8 GiB of optimizer states, 57 GiB remain.
        (
            config(gpuMemoryUtilization=0.8),
            "generation.gpuMemoryUtilization: 0.8 of the GPU is 64.0 GiB for vLLM, whose weights take 13.0 GiB",
        ),
        (
            config(gpuMemoryUtilization=0.8),
            "13.0 GiB for weights, 9.8 GiB for optimizer states and 3.3 GiB for gradients; the GPU has 80.0 GiB",
        ),
        (config(gpuMemoryUtilization=0.8), "0.71 would work"),
        (config(gpuMemoryUtilization=0.7, colocate={"sleepLevel": 0}), "0.67 would work"),
        (config(gpuMemoryUtilization=0.1), "0.71 would work"),
        (config(kvCacheMemory="60Gi"), "generation.kvCacheMemory: 60Gi and the weights are 73.0 GiB for vLLM"),
        (config(kvCacheMemory="60Gi"), "would work"),
        # Without the 9.8 GiB, 66.9 GiB remain; with an engine that never sleeps they share the GPU in the optimizer's
        # step.
        (config(gpuMemoryUtilization=0.9, parallelism={"offloadOptimizer": "generating"}), "0.83 would work"),
        (
            config(gpuMemoryUtilization=0.9, parallelism={"offloadOptimizer": "generating"}),
            "9.8 GiB for optimizer states (9.8 GiB of them in host memory while vLLM generates) "
            "and 3.3 GiB for gradients",
        ),
        (
            config(
                gpuMemoryUtilization=0.7, colocate={"sleepLevel": 0}, parallelism={"offloadOptimizer": "generating"}
            ),
            "0.67 would work",
        ),
    ],
)
def test_a_share_that_leaves_too_little_is_refused_with_one_that_works(settings: TrainerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(settings)


def test_no_share_is_suggested_if_training_alone_is_too_large() -> None:
    with pytest.raises(
        ValueError,
        match=r"generation\.gpuMemoryUtilization: .* No value would work; parallelism\.zeroStage 3, .* more ranks",
    ):
        check(config(parallelism={"zeroStage": 0}), world_size=1)
    check(config(parallelism={"zeroStage": 3, "offloadOptimizer": "cpu"}), world_size=1)
    # States that return for the optimizer's step must fit then, however long they are offloaded.
    with pytest.raises(ValueError, match=r"No value would work; .* generating, where training alone fits"):
        check(config(parallelism={"offloadOptimizer": "generating"}), world_size=1)


def test_a_cache_that_needs_the_memory_of_the_states_is_accepted_if_they_are_offloaded() -> None:
    cache = {"kvCacheMemory": "48Gi"}  # 80 GiB, less 13 for the engine's weights, 13 for the trainer's, 9.8 for states
    with pytest.raises(ValueError, match="45203Mi would work"):
        check(config(**cache))
    check(config(**cache, parallelism={"offloadOptimizer": "generating"}))


@given(
    st.floats(0.01, 0.9),
    st.booleans(),
    st.floats(0.1, 80),
    st.sampled_from([1, 2, 8, 64]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["none", "generating"]),
)
def test_what_a_refusal_suggests_is_accepted(
    share: float,
    by_share: bool,
    billions: float,
    world_size: int,
    stage: int,
    level: int,
    tensor_parallel: int,
    offload: str,
) -> None:
    def settings(value: Any) -> TrainerConfig:
        size = {"gpuMemoryUtilization": float(value)} if by_share else {"kvCacheMemory": value}
        common = {"tensorParallel": tensor_parallel, "colocate": {"sleepLevel": level}}
        return config(parallelism={"zeroStage": stage, "offloadOptimizer": offload}, **common, **size)

    try:
        check(settings(share if by_share else f"{int(share * 80)}Gi"), billions=billions, world_size=world_size)
    except ValueError as error:
        if suggested := re.search(r"(\S+) would work$", str(error)):
            check(settings(suggested[1]), billions=billions, world_size=world_size)


def test_the_default_shares_of_the_topologies() -> None:
    server = config(topology="Server").generation
    assert (config().generation.gpu_share, server.gpu_share) == (0.3, 0.9)
    assert config(topology="Server", gpuMemoryUtilization=0.6).generation.gpu_share == 0.6


def test_with_lora_only_adapters_have_states_and_the_model_is_its_own_reference() -> None:
    need = training_footprint(
        config(beta=0.1, parallelism={"zeroStage": 2}), num_parameters=1000, world_size=2, num_adapted=100
    )
    assert (need.weights, need.optimizer, need.gradients) == (2 * 1100, 12 * 50, 4 * 50)
    need = training_footprint(
        config(beta=0.1, parallelism={"zeroStage": 3}), num_parameters=1000, world_size=2, num_adapted=100
    )
    assert (need.weights, need.optimizer) == (2 * 550, 16 * 50)
    lora = {"total": 80 * GIB, "num_parameters": 7_000_000_000, "world_size": 1}
    with pytest.raises(ValueError, match="No value would work"):
        check_room(config(gpuMemoryUtilization=0.5), **lora)
    check_room(config(gpuMemoryUtilization=0.5), **lora, num_adapted=40_000_000)


def test_weights_in_4_bits_take_a_quarter_of_the_trainers_memory_and_none_of_the_engines() -> None:
    sizes = {"num_parameters": 5000, "num_adapted": 100, "num_quantized": 2**12}
    need = training_footprint(config(beta=0.1), world_size=2, **sizes)
    # 64 weights have a constant of a byte, and 256 of these one of 4 bytes.
    assert need.weights == 2 * (5100 - 2**12) + 2**11 + 2**6 + 1
    gpu = {"total": 24 * GIB, "num_parameters": 7_600_000_000, "world_size": 1, "num_adapted": 40_000_000}
    lora = {"lora": LoraConfig()}
    with pytest.raises(ValueError, match=r"No value would work; parallelism.zeroStage 3, lora.loadIn4Bit, para"):
        check_room(config(gpuMemoryUtilization=0.7).model_copy(update=lora), **gpu)
    check_room(config(gpuMemoryUtilization=0.7), **gpu, num_quantized=6_500_000_000)
    lora = {"lora": LoraConfig(load_in_4bit=True)}
    with pytest.raises(ValueError, match=r"No value would work; parallelism.offloadOptimizer"):
        check_room(config().model_copy(update=lora), **gpu | {"total": 16 * GIB}, num_quantized=6_500_000_000)


def test_parameters_are_counted_once_and_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    assert num_parameters(model.parameters()) == 12
    model[0].weight.ds_numel = 24  # the whole size, which ZeRO-3 notes on a partition
    assert num_parameters(model.parameters()) == 24
