"""An optimizer step without gradient checkpointing, and one with it and tiles: tiled.py OUT MODE MODEL MODE MODEL...

A MODE is a stage of ZeRO, a + if gradients are reduced once a step, and for adapters :lora, :4bit, or :mlp for adapters
of MLPs alone. Rank 0 saves, by mode and model, metrics and trained parameters after both steps. Each rank reports, by
mode and model, how many tiles the first MLP has computed before the step with tiles, and then in it.
"""

import os
import sys
from typing import Any

import torch
from fixed_samples import make_policy, samples, take_step, trained
from results import report

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.policy.model import tiles
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
    policy = make_policy(config)
    forwards = []
    for first in [*tiles.wrapped(policy.module)][:1]:
        next(first.children()).register_forward_hook(lambda *_: forwards.append(1))
    policy.logprobs(micro_batch([*samples(0)][: 3 + 3 * int(os.environ["RANK"])]))
    before = len(forwards)
    metrics = take_step(policy, 0, config.training)
    return metrics, trained(policy), [before, len(forwards) - before]


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
