"""Steps of several runs, resumed with other numbers of ranks or ZeRO stages: reshape.py MODEL DATA OUT ATTEMPT PLAN...

A PLAN is RUN:DTYPE:STAGE, or RUN:DTYPE:STAGE:OPTIMIZER_DTYPE. Runs named "...lora" train adapters; those named
"away..." have their optimizer states on the device only during steps; the one named "sync" has a reference model that
follows the policy. A run without a checkpoint takes steps 0 and 1, saves, and takes steps 2 and 3 for comparison. A run
with a checkpoint takes the next step and saves. OUT gets, by run: the optimizer's master weights, moments and step as
they were loaded and as they were saved, and the metrics of the steps.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from fixed_samples import make_policy, take_step
from transformers import AutoTokenizer

from grpo_spec.contract import Device
from grpo_spec.storage import ExportConfig
from grpo_workload.policy.memory.optimizer_offload import adam
from grpo_workload.ranks.collectives import join
from grpo_workload.storage.checkpoint_content import SavedState
from grpo_workload.storage.checkpoints import Checkpoints
from grpo_workload.storage.exports import Exports
from support.trainer.step_settings import bare_settings


@contextmanager
def plain_moments(policy):
    """Within it, DeepSpeed finds moments in float32, and of 8 bits their values."""
    states, before = adam(policy.deepspeed_engine).state, {}
    if not policy.has_int8_moments:
        yield
        return
    from grpo_workload.policy.step.int8_moments import as_plain

    assert torch.uint8 in {state["state1"].dtype for state in states.values()}
    for tensor, state in states.items():
        before[tensor] = dict(state)
        state |= as_plain(state)
        for parameter in policy.module.parameters():
            if getattr(parameter, "_hp_mapping", None) is not None:
                parameter._hp_mapping.set_optim_state_fragment(tensor, state)
    yield
    states.update(before)


def optimizer_state(policy):
    """Return gathered master weights and moments by parameter, and AdamW's step; without ZeRO torch holds them."""
    states, whole = adam(policy.deepspeed_engine).state, {}
    with policy.with_states(), plain_moments(policy):
        for name, parameter in policy.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if policy.deepspeed_engine.zero_optimization():
                moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
                tensors = [safe_get_full_fp32_param(parameter), *moments]
            else:
                tensors = [parameter.data, states[parameter]["exp_avg"], states[parameter]["exp_avg_sq"]]
            whole[name] = [tensor.clone() for tensor in tensors]
        return whole, {float(state["step"]) for state in states.values() if "step" in state}


def take(policy, step, config):
    """Take a step; return its metrics without times."""
    metrics = take_step(policy, step, config.training)
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def main(model, data, out, attempt, plans):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(Device.CPU, 300)
    results: dict[str, Any] = {}
    for plan in plans:
        run, dtype, stage, *others = plan.split(":")
        optimizer_dtype = others[0] if others else "float32"
        offload = "generating" if run.startswith("away") else "none"
        config = bare_settings(
            model,
            dtype,
            training={
                "learningRate": 1e-3,
                "weightDecay": 0.5,
                "warmupSteps": 3,
                "lrSchedulerType": "cosine_with_min_lr",
                "lrSchedulerKwargs": {"min_lr_rate": 0.1},
                "perDeviceTrainBatchSize": 4,
                "importanceSamplingCorrection": "none",
                **({"beta": 0.1, "syncRefModel": True, "refModelSyncSteps": 2} if run == "sync" else {}),
            },
            parallelism={"zeroStage": int(stage), "offloadOptimizer": offload, "optimizerDtype": optimizer_dtype},
            **{"lora": {"modulesToSave": ["norm"]}} if run.endswith("lora") else {},
        )
        checkpoints = Checkpoints(Path(data), run, keep=9, attempt=int(attempt), pod_uid=f"uid-{attempt}")
        shape: dict[str, Any] = {"world_size": world_size, "zero_stage": int(stage)}
        shape |= {"lora": config.adapters, "optimizer_dtype": optimizer_dtype}
        try:
            source = checkpoints.find(None, **shape)
        except ValueError as error:
            results[run] = str(error)
            continue
        load_universal = source is not None and source.is_universal
        reference = source.reference if source is not None else None
        policy = make_policy(config, load_universal=load_universal, reference=reference)
        start = 0
        if source is not None:
            source.load(policy)
            start = source.state.step
        state = optimizer_state(policy) if source is not None else None
        metrics = [take(policy, step, config) for step in ([0, 1] if source is None else [start])]
        step = start + len(metrics)
        saved = optimizer_state(policy)
        tokenizer = AutoTokenizer.from_pretrained(model)
        checkpoints.save(policy, tokenizer, SavedState(step=step, weight_version=step, num_tokens=0, **shape))
        if run.endswith("lora"):
            for kind in ("merged", "adapters"):
                exports = Exports(
                    Path(data), f"{run}/{kind}", ExportConfig(every_steps=1, keep=1, lora=kind), checkpoints.fence
                )
                exports.begin(policy, tokenizer, step, f"# {kind}").publish()
        if source is None:
            metrics += [take(policy, step, config) for step in (2, 3)]
        results[run] = {"loaded": state, "saved": saved, "metrics": metrics, "universal": load_universal}
    if rank == 0:
        torch.save(results, out)


_, model, data, out, attempt, *plans = sys.argv
main(model, data, out, attempt, plans)
