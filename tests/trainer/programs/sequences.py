"""Steps on fixed samples by ranks that share sequences: sequences.py DEVICE OUT SEQUENCE MODE MODEL MODE MODEL...

A MODE is a stage of ZeRO, a b for bfloat16 in place of float32, and :lora for adapters or :replay for routers that the
trial of the policy replays. Rank 0 saves, by mode and model, the metrics of two steps, of which the second gives most
ranks nothing to train on, the trained parameters after each, and the KL divergences of the first step's completions
before and after; then whether a step whose loss is infinite was skipped, and the metrics of four on one generation.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import sys

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

device = Device(sys.argv[1])
environment.prepare(device, os.environ)

import torch
from fixed_samples import divergences_of, make_policy, take_generation, take_step, trained

from grpo_workload.policy.model import tiles
from grpo_workload.policy.trials.trial import try_policy
from support.trainer.step_settings import bare_settings

tiles.TILE = 5


def configured(mode, model, sequence):
    stage, _, kind = mode.partition(":")
    return bare_settings(
        model,
        "bfloat16" if stage.endswith("b") else "float32",
        training={
            "learningRate": 1.0,
            "maxSteps": 10,
            "adamEpsilon": 1.0,  # so that a step is nearly the gradient
            "maxGradNorm": 1e6,
            "maxTokensPerMicroBatch": 48,
            "beta": 0.1,
            "entropyCoef": 0.1,
            "repetitionPenalty": 1.1,
            "topEntropyQuantile": 0.6,
            "importanceSamplingCorrection": "none",
            "routerReplay": kind == "replay",
        },
        parallelism={"zeroStage": int(stage[0]), "gradientCheckpointing": stage != "0", "sequence": sequence},
        lora={"r": 4, "alpha": 64} if kind == "lora" else None,
    )


def steps(config):
    torch.manual_seed(0)  # adapters
    policy = make_policy(config, device)
    try_policy(policy, config)
    found = {"kls": [divergences_of(policy, config.training)], "metrics": [], "weights": []}
    for step in range(2):
        found["metrics"].append(take_step(policy, step, config.training))
        found["weights"].append(trained(policy))
    found["kls"].append(divergences_of(policy, config.training))
    found["skipped"] = take_step(policy, 2, config.training, broken=True)["skipped"]
    found["generation"] = take_generation(policy, config)
    return found


def main(out, sequence, plans):
    results = {
        f"{mode} {model}": steps(configured(mode, model, int(sequence)))
        for mode, model in zip(plans[::2], plans[1::2], strict=True)
    }
    if os.environ["RANK"] == "0":
        torch.save(results, out)


main(sys.argv[2], sys.argv[3], sys.argv[4:])
