"""An optimizer step without gradient checkpointing, and one with it and tiles: tiled.py OUT MODE MODEL MODE MODEL...

A MODE is a stage of ZeRO, a + if gradients are reduced once a step, and for adapters :lora, :4bit, or :mlp for adapters
of MLPs alone. Rank 0 saves, by mode and model, metrics and trained parameters after both steps. Each rank reports, by
mode and model, how many tiles the first MLP has computed before the step with tiles, and then in it.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import sys
from typing import Any

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

environment.prepare(Device.CPU, os.environ)

import deepspeed
import torch
from accelerate.state import AcceleratorState
from fixed_samples import PAD, samples, take_step
from results import report

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.policy.model import tiles
from grpo_workload.policy.step.policy import Policy
from support.trainer.step_settings import bare_settings

ADAPTERS = {
    "": None,
    "lora": {"r": 4, "alpha": 64},
    "4bit": {"r": 4, "alpha": 64, "loadIn4Bit": True},
    "mlp": {"r": 4, "alpha": 64, "targetModules": ["gate_proj", "up_proj", "down_proj"]},
}
tiles.TILE = 5


def configured(mode, model, *, tiled):
    stage, _, adapters = mode.partition(":")
    return bare_settings(
        model,
        "float32",
        training={
            "learningRate": 1.0,
            "adamEpsilon": 1.0,  # so that the step is nearly the gradient
            "maxGradNorm": 1e6,
            "beta": 0.1,
            "importanceSamplingCorrection": "none",
        },
        parallelism={
            "zeroStage": int(stage[0]),
            "gradientCheckpointing": tiled,
            "coalesceGradReduction": stage.endswith("+"),
        },
        lora=ADAPTERS[adapters],
    )


def step(config):
    """Return metrics and trained parameters after a step, and the numbers of tiles."""
    torch.manual_seed(0)  # adapters
    policy = Policy(config, Device.CPU, timeout_seconds=300, pad_token_id=PAD)
    forwards = []
    for first in [*tiles.wrapped(policy.module)][:1]:
        next(first.children()).register_forward_hook(lambda *_: forwards.append(1))
    policy.logprobs(micro_batch([*samples(0)][: 3 + 3 * int(os.environ["RANK"])]))
    before = len(forwards)
    metrics = take_step(policy, 0, config.training)
    trained = {name: one for name, one in policy.module.named_parameters() if one.requires_grad}
    with deepspeed.zero.GatheredParameters([*trained.values()], enabled=policy.is_partitioned):
        weights = {name: one.detach().clone() for name, one in trained.items()}
    AcceleratorState._reset_state(reset_partial_state=True)
    return metrics, weights, [before, len(forwards) - before]


def main(out, plans):
    results: dict[str, list[Any]] = {}
    counts = {}
    for mode, model in zip(plans[::2], plans[1::2], strict=True):
        results[f"{mode} {model}"] = found = []
        for tiled in (False, True):
            *kept, counts[f"{mode} {model}"] = step(configured(mode, model, tiled=tiled))
            found.append(kept)
    if os.environ["RANK"] == "0":
        torch.save(results, out)
    report(counts)


main(sys.argv[1], sys.argv[2:])
