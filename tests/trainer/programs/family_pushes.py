"""Three pushes to a colocated vLLM on one device, each checked.

    family_pushes.py MODEL TRAINS DEVICE STAGE ATTENTION ARGUMENTS

TRAINS is "all" or "adapters", DEVICE "cuda" or "cpu", STAGE that of ZeRO, ATTENTION that of training; ARGUMENTS are
vLLM's, as JSON. Fails when log-probabilities of engine and trainer differ beyond a job's bound, or by more than a third
of what they differ by before a push of changed weights. Reports how much they differ by after each.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import json
import logging
import os
import sys

from grpo_workload.ranks import environment
from grpo_workload.spec.contract import Device

model, trains, device, stage = sys.argv[1], sys.argv[2], Device(sys.argv[3]), int(sys.argv[4])
attention, arguments = sys.argv[5:]
environment.prepare(device, os.environ)

import deepspeed
import torch
from results import report
from transformers import AutoConfig, AutoTokenizer

from grpo_workload.generation.colocate import ColocateGenerator
from grpo_workload.policy.policy import Policy
from grpo_workload.policy.trial import try_policy
from grpo_workload.spec.trainer import TrainerConfig
from grpo_workload.training.weight_check import WeightCheck

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
config = TrainerConfig.model_validate(
    {
        "model": {
            "path": model,
            "dtype": str(AutoConfig.from_pretrained(model).dtype).removeprefix("torch."),
            "attention": attention,
        },
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "training": {"perDeviceTrainBatchSize": 1, "maxCompletionLength": 8},  # for families with a state, too
        "parallelism": {"zeroStage": stage},
        **({"lora": {"r": 8}} if trains == "adapters" else {}),
        "generation": {
            "maxModelLen": 256,
            "kvCacheMemory": "1Gi" if device == Device.CUDA else "64Mi",
            "engineArgs": {"enforce_eager": True, **json.loads(arguments)},
        },
    }
)
policy = Policy(config, device, timeout_seconds=300, pad_token_id=0)
try_policy(policy, config)
generator = ColocateGenerator(config, device)
pushed = []
check = WeightCheck(config, AutoTokenizer.from_pretrained(model))
for version in range(3):
    if version > 0:
        trained = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
        with (
            torch.no_grad(),
            deepspeed.zero.GatheredParameters(trained, modifier_rank=0, enabled=policy.is_partitioned),
        ):
            for parameter in trained:
                parameter.add_(torch.randn_like(parameter) * (0.1 if trains == "adapters" else 0.05))
        (stale,) = check.differences(policy, generator).values()
        logging.info("not pushed: log-probabilities differ by %.2g", stale)
        generator.sleep()  # not before the first push, which may not change what the engine has loaded
    generator.sync_weights(policy.weights(), version)
    check.run(policy, generator, version)
    (fresh,) = check.differences(policy, generator).values()
    pushed.append(fresh)
    assert version == 0 or fresh < stale / 3, "what was pushed is not what the engine computes with"
report({"pushed": pushed})
generator.close()
