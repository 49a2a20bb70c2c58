"""Steps in float16 whose first gradients overflow, on 2 ranks, saved and gone on from: half.py MODEL DATA OUT STAGE[+]...

DeepSpeed refuses float16 on a CPU without instructions for it. torch computes in it all the same, slowly: loss scaling is DeepSpeed's own.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from grpo_workload import environment
from grpo_workload.contract import Device

environment.prepare(Device.CPU, os.environ)

import fixed_samples
from accelerate.state import AcceleratorState
from deepspeed.accelerator import get_accelerator
from transformers import AutoTokenizer

from grpo_workload.checkpoint import Checkpoints, TrainerState
from grpo_workload.config import TrainerConfig
from grpo_workload.engine import Policy

get_accelerator().is_fp16_supported = lambda: True
samples = fixed_samples.samples
# Advantages so large that gradients, which are clipped only after, do not fit: the scale has to come down from 65536.
fixed_samples.samples = lambda step: (replace(sample, advantage=sample.advantage * 20) for sample in samples(step))


def make_config(model, name):
    config = {
        "model": {"path": model, "dtype": "float16"},
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "training": {"perDeviceTrainBatchSize": 2, "learningRate": 1e-3, "maxSteps": 20, "importanceSamplingCorrection": "none"},
        "parallelism": {"zeroStage": int(name[0]), "coalesceGradReduction": name.endswith("+")},
    }
    return TrainerConfig.model_validate(config)


def make_policy(config):
    AcceleratorState._reset_state(reset_partial_state=True)
    return Policy(config, Device.CPU, timeout_seconds=60, pad_token_id=fixed_samples.PAD)


def checksum(policy):
    return sum(weight.double().abs().sum().item() for _, weight in policy.weights())


def take_steps(policy, config, steps):
    for step in steps:
        before = checksum(policy)
        metrics = fixed_samples.take_step(policy, step, config.training)
        yield metrics | {"moved": checksum(policy) != before}


def main(model, data, out, names):
    results = {}
    for name in names:
        config = make_config(model, name)
        policy = make_policy(config)
        steps = list(take_steps(policy, config, range(8)))
        checkpoints = Checkpoints(Path(data), f"stage-{name[0]}", keep=1, epoch=0, pod_uid="uid")
        state = TrainerState(step=8, weight_version=8, num_tokens=0, world_size=2, zero_stage=int(name[0]))
        checkpoints.save(policy, AutoTokenizer.from_pretrained(model), state)
        straight = list(take_steps(policy, config, [8, 9]))
        resumed = make_policy(config)
        checkpoints.find(None, world_size=2, zero_stage=int(name[0])).load(resumed)
        results[name] = {"steps": steps, "straight": straight, "resumed": list(take_steps(resumed, config, [8, 9]))}
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(results))


main(*sys.argv[1:4], sys.argv[4:])
