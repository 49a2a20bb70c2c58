"""The bytes that DeepSpeed holds on a rank, as they were counted in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_spec.trainer import TrainerConfig
from grpo_workload.capacity.states import Footprint, bucket_bytes, live_bytes, num_parameters, training_footprint
from support.trainer.places import CONFIG


def config(
    dtype: str = "bfloat16", beta: float = 0.0, parallelism: dict[str, Any] | None = None, **generation: Any
) -> TrainerConfig:
    sections = {"model": {"name": "m", "dtype": dtype}, "training": {"beta": beta}, "generation": generation}
    return TrainerConfig.model_validate(CONFIG | sections | {"parallelism": parallelism or {}})


# Bytes for each parameter, counted over all tensors of one rank of two after the optimizer's step, and before it, in
# DeepSpeed 0.19.8, and those that are in host memory between steps: for each ZeRO stage.
COUNTED = {
    ("bfloat16", "float32"): [(14, 16, 12), (12, 14, 6), (8, 10, 6), (9, 9, 6)],
    ("float32", "float32"): [(12, 16, 8), (10, 12, 6), (10, 12, 6), (10, 10, 6)],
    ("bfloat16", "bfloat16"): [(6, 8, 4), (5, 7, 3), (5, 6, 3), (5, 5, 3)],
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("dtype", "optimizer"), COUNTED)
def test_states_and_gradients_are_those_measured_in_deepspeed(dtype: str, optimizer: str, stage: int) -> None:
    """Those that are offloaded while the engine generates return for the step."""
    after, before, away = (1000 * size for size in COUNTED[dtype, optimizer][stage])
    parallelism = {"zeroStage": stage, "optimizerDtype": optimizer}
    stay, leave = (
        training_footprint(config(dtype, parallelism=parallelism | more), num_parameters=1000, world_size=2)
        for more in ({}, {"offloadOptimizer": "generating"})
    )
    assert (stay.states, stay.states + stay.gradients) == (after, before)
    assert (stay.away, leave.away, leave.states) == (0, away, stay.states - away)
    assert (leave.weights, leave.most) == (stay.weights, stay.most)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_moments_in_8_bits_take_a_quarter_and_leave_masters_and_gradients_as_they_are(stage: int, dtype: str) -> None:
    def need(optimizer_dtype: str) -> Footprint:
        parallelism = {"zeroStage": stage, "optimizerDtype": optimizer_dtype, "offloadOptimizer": "generating"}
        return training_footprint(config(dtype, parallelism=parallelism), num_parameters=51200, world_size=2)

    whole, ours = need("float32"), need("int8")
    share = 51200 if stage == 0 else 25600
    assert (whole.moments, ours.moments) == (8 * share, 2 * share + 2 * 4 * share // 256)
    assert replace(whole, moments=0, away=0) == replace(ours, moments=0, away=0)
    assert ours.away == whole.away - whole.moments + ours.moments


def test_an_offloaded_optimizer_takes_no_memory_and_a_reference_model_doubles_the_weights() -> None:
    offloaded = config(beta=0.1, parallelism={"zeroStage": 3, "offloadOptimizer": "cpu"})
    need = training_footprint(offloaded, num_parameters=1000, world_size=4)
    assert (need.weights, need.reference, need.states, need.gradients) == (500, 500, 1000, 0)


def test_the_default_shares_of_the_topologies() -> None:
    server = config(topology="Server").generation
    assert (config().generation.gpu_share, server.gpu_share) == (0.3, 0.9)
    assert config(topology="Server", gpuMemoryUtilization=0.6).generation.gpu_share == 0.6


def test_with_lora_only_adapters_have_states_and_the_model_is_its_own_reference() -> None:
    sizes = {"num_parameters": 1000, "world_size": 2, "num_adapted": 100}
    need = training_footprint(config(beta=0.1, parallelism={"zeroStage": 2}), **sizes)
    assert (need.weights, need.reference) == (2 * 1100, 0)
    assert (need.masters + need.moments, need.gradients) == (12 * 50, 4 * 50)
    need = training_footprint(config(beta=0.1, parallelism={"zeroStage": 3}), **sizes)
    assert (need.weights, need.masters + need.moments, need.kept) == (2 * 550, 12 * 50, 4 * 50)


def test_weights_in_4_bits_take_a_quarter_of_the_trainers_memory_and_none_of_the_engines() -> None:
    sizes = {"num_parameters": 5000, "num_adapted": 100, "num_quantized": 2**12}
    need = training_footprint(config(beta=0.1), world_size=2, **sizes)
    # 64 weights have a constant of a byte, and 256 of these one of 4 bytes.
    assert need.weights == 2 * (5100 - 2**12) + 2**11 + 2**6 + 1


def test_what_is_gathered_and_what_is_on_its_way_has_deepspeeds_bounds() -> None:
    sharded = config(parallelism={"zeroStage": 3})
    assert live_bytes(sharded, num_parameters=400_000_000, world_size=4) == 2 * 300_000_000
    assert live_bytes(sharded, num_parameters=7_000_000_000, world_size=4) == 2 * 1_050_000_000
    assert live_bytes(config(), num_parameters=7_000_000_000, world_size=4) == 0
    assert live_bytes(sharded, num_parameters=7_000_000_000, world_size=1) == 0  # DeepSpeed's NoGatherHandle: no copy
    assert bucket_bytes(sharded, num_trained=7_000_000_000, world_size=4) == 2 * 2 * 50_000_000
    assert bucket_bytes(config(), num_trained=1000, world_size=4) == 2 * 1000
    whole = config(parallelism={"zeroStage": 0})
    assert [bucket_bytes(whole, num_trained=7 * 10**9, world_size=size) for size in (1, 2)] == [0, 10**9]


def test_parameters_are_counted_once_and_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    assert num_parameters(model.parameters()) == 12
    model[0].weight.ds_numel = 24  # the whole size, which ZeRO-3 notes on a partition
    assert num_parameters(model.parameters()) == 24
