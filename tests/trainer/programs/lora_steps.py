"""Two optimizer steps on adapters, a checkpoint, and a third step twice: directly, and resumed from the checkpoint.

lora_steps.py MODEL FOLDER BETA PLAN...: a PLAN is STAGE, STAGE:MODULE,... with modules that are trained whole, or
STAGE-4bit. For each plan, FOLDER gets a checkpoint, and PLAN.pt with the metrics, the exported weights, and all
parameters of the policy; also after a fourth step, whose loss is infinite on the last rank. Where no modules are
trained whole, another policy begins with the adapters of the checkpoint.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from fixed_samples import make_policy, resume, take_step, trained
from results import error_of
from transformers import AutoTokenizer

from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from support.trainer.step_settings import step_settings


def parameters(policy):
    """Return all parameters of the policy, adapters included, gathered."""
    return trained(policy, also_frozen=True)


def exported(policy):
    """Return the weights that engines get."""
    return {name: weight.clone() for name, weight in policy.weights()}


def main(model, folder, beta, plans):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
        policy = make_policy(config)
        checkpoints = Checkpoints(Path(folder), plan, keep=9, attempt=0, pod_uid="uid")
        result = {"initial": parameters(policy), "first": exported(policy)}
        result["metrics"] = [take_step(policy, step, config.training) for step in (0, 2)]
        result |= {"own": parameters(policy), "exported": exported(policy)}
        shape: dict[str, Any] = {"world_size": world_size, "zero_stage": int(stage)}
        state = SavedState(step=2, weight_version=2, num_tokens=0, lora=config.adapters, **shape)
        checkpoints.save(policy, AutoTokenizer.from_pretrained(model), state)
        straight = take_step(policy, 3, config.training)
        result["straight"] = straight, parameters(policy)
        result["skipped"] = take_step(policy, 4, config.training, broken=True)["skipped"], parameters(policy)

        result["refusal"] = error_of(checkpoints.find, None, **shape)
        torch.manual_seed(7)
        resumed = make_policy(config)
        resume(resumed, checkpoints, zero_stage=int(stage), lora=config.adapters)
        result["resumed"] = take_step(resumed, 3, config.training), parameters(resumed)
        if not whole:
            assert config.lora is not None
            begun = config.lora.model_copy(update={"path": f"{folder}/{plan}/checkpoints/step-2/model", "r": 16})
            began = make_policy(config.model_copy(update={"lora": begun}))
            result["began"] = exported(began), take_step(began, 3, config.training)
        if rank == 0:
            torch.save(result, Path(folder) / f"{plan}.pt")


main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:])
