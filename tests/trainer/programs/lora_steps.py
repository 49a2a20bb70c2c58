"""Two optimizer steps on adapters, a checkpoint, and a third step twice: directly, and resumed from the checkpoint.

lora_steps.py MODEL FOLDER BETA PLAN...: a PLAN is STAGE, STAGE:MODULE,... with modules that are trained whole, or
STAGE-4bit. For each plan, FOLDER gets a checkpoint, and PLAN.pt with the metrics, the exported weights, and all
parameters of the policy; also after a fourth step, whose loss is infinite on the last rank. Where no modules are
trained whole, another policy begins with the adapters of the checkpoint.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import sys
from pathlib import Path

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

environment.prepare(Device.CPU, os.environ)

import deepspeed
import torch
from accelerate.state import AcceleratorState
from fixed_samples import PAD, take_step
from transformers import AutoTokenizer

from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import join
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from support.trainer.step_settings import step_settings


def parameters(policy):
    """Return all parameters of the policy, adapters included, gathered."""
    own = list(policy.module.named_parameters())
    with deepspeed.zero.GatheredParameters([parameter for _, parameter in own], enabled=policy.is_partitioned):
        return {name: parameter.detach().clone() for name, parameter in own}


def exported(policy):
    """Return the weights that engines get."""
    return {name: weight.clone() for name, weight in policy.weights()}


def main(model, folder, beta, plans):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(Device.CPU, 300)
    for plan in plans:
        stages, _, whole = plan.partition(":")
        stage, _, bits = stages.partition("-")
        config = step_settings(
            model,
            "float32",
            stage,
            training={"learningRate": 1e-2, "beta": beta},
            parallelism={"gradientCheckpointing": stage != "0"},
            lora={"r": 4, "alpha": 8, "modulesToSave": whole.split(",") if whole else [], "loadIn4Bit": bool(bits)},
        )
        checkpoints = Checkpoints(Path(folder), plan, keep=9, attempt=0, pod_uid="uid")
        policy = Policy(config, Device.CPU, timeout_seconds=300, pad_token_id=PAD)
        initial = parameters(policy)
        first = exported(policy)
        metrics = [take_step(policy, step, config.training) for step in (0, 2)]
        result = {
            "initial": initial,
            "first": first,
            "own": parameters(policy),
            "exported": exported(policy),
            "metrics": metrics,
        }
        state = SavedState(
            step=2, weight_version=2, num_tokens=0, world_size=world_size, zero_stage=int(stage), lora=config.adapters
        )
        checkpoints.save(policy, AutoTokenizer.from_pretrained(model), state)
        straight = take_step(policy, 3, config.training)
        result["straight"] = straight, parameters(policy)
        result["skipped"] = take_step(policy, 4, config.training, broken=True)["skipped"], parameters(policy)

        AcceleratorState._reset_state(reset_partial_state=True)
        join(Device.CPU, 300)
        try:
            checkpoints.find(None, world_size=world_size, zero_stage=int(stage))
        except ValueError as error:
            result["refusal"] = str(error)
        source = checkpoints.find(None, world_size=world_size, zero_stage=int(stage), lora=config.adapters)
        torch.manual_seed(7)
        resumed = Policy(config, Device.CPU, timeout_seconds=300, pad_token_id=PAD)
        assert source is not None
        source.load(resumed)
        result["resumed"] = take_step(resumed, 3, config.training), parameters(resumed)
        AcceleratorState._reset_state(reset_partial_state=True)
        join(Device.CPU, 300)
        if not whole:
            assert config.lora is not None
            begun = config.lora.model_copy(update={"path": f"{folder}/{plan}/checkpoints/step-2/model", "r": 16})
            began = Policy(config.model_copy(update={"lora": begun}), Device.CPU, timeout_seconds=300, pad_token_id=PAD)
            result["began"] = exported(began), take_step(began, 3, config.training)
            AcceleratorState._reset_state(reset_partial_state=True)
            join(Device.CPU, 300)
        if rank == 0:
            torch.save(result, Path(folder) / f"{plan}.pt")


main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:])
