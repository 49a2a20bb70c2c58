"""Two optimizer steps of families as a job takes them, each pushed to the engine and checked.

    family_steps.py DEVICE ENGINE MODELS

DEVICE is "cuda" or "cpu", ENGINE "vLLM" (for one model) or "Transformers". MODELS is a list, as JSON, of dicts: `path`;
`modes`, such as 3:full or 0:lora, the stage of ZeRO and what is trained; and `model`, `training` and `engineArgs` of
the job, beside those below. All modes train on the same samples and share an engine.

Rank 0 appends a line to RESULTS/lines.jsonl for each model and mode that is through; the first that is not ends the
program. A mode is through if weights have the checkpoint's names, the loss and the gradients are finite, the gradients
and (in float32) the weights are those of `plain_steps`, the engine samples from what is trained, and log-probabilities
of engine and trainer differ after each push by no more than a job's bound, and by less than a third of what they differ
by before it.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import gc
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from grpo_spec.contract import Device
from grpo_workload.ranks import environment

kind, engine, models = sys.argv[1:]
device = Device(kind)
environment.prepare(device, os.environ)

import torch
import torch.distributed as dist
from fixed_samples import make_policy, train_on, trained
from plain_steps import plain_steps
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.samples import Prompt, Sample
from grpo_workload.generation.base import Generator
from grpo_workload.generation.plain_generate import TransformersGenerator
from grpo_workload.policy.trials.trial import try_policy
from grpo_workload.training.weight_check import BOUNDS, WeightCheck
from support.trainer.samples import make_sample
from support.trainer.step_settings import bare_settings

LR, NUM_STEPS = 1e-2, 2
STEP = 0.03 * LR  # AdamW moves each weight by LR in its first step


def configured(model, trains, stage):
    path = model["path"]
    dtype = str(AutoConfig.from_pretrained(path).dtype).removeprefix("torch.")
    training = {
        "perDeviceTrainBatchSize": 3,  # two micro-batches for a step
        "learningRate": LR,
        "lrSchedulerType": "constant",
        "maxCompletionLength": 8,
        "importanceSamplingCorrection": "none",
    }
    return bare_settings(
        path,
        dtype,
        model={"path": path, "dtype": dtype} | model.get("model", {}),
        training=training | model.get("training", {}),
        parallelism={"zeroStage": stage},
        lora={"r": 8, "alpha": 64} if trains == "lora" else None,  # large: it must show next to rounding
        generation={
            "engine": engine,
            "maxModelLen": 256,
            "kvCacheMemory": "1Gi" if device == Device.CUDA else "64Mi",
            "gpuMemoryUtilization": 0.1,  # less must be free where others are at work
            "engineArgs": {"enforce_eager": True} | model.get("engineArgs", {}),
        },
    )


def samples(step):
    """Return four samples of a step, with advantages of both signs. They are longer than the families' windows."""
    random = torch.Generator().manual_seed(step)

    def tokens(low, high):
        length = int(torch.randint(low, high, (), generator=random))
        return tuple(torch.randint(3, 250, (length,), generator=random).tolist())

    made = []
    for index, advantage in enumerate((1.0, -1.0, 0.5, -1.5)):
        made.append(make_sample(tokens(3, 12), tokens(12, 24), index=index, advantage=advantage))
    return made


def shares(every):
    """Return the samples of each rank."""
    return [every[rank :: dist.get_world_size()] for rank in range(dist.get_world_size())]


def compare_step(policy, metrics, before, plain, *, is_first):
    """Return what a step did, next to `plain`. Raises AssertionError where that is not what it should have done."""
    after, (norm, weights) = trained(policy), plain
    exact = next(iter(after.values())).dtype == torch.float32
    off = sum(int(((after[name].float() - weights[name]).abs() > STEP).sum()) for name in after)
    step = {
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        "plain_grad_norm": norm,
        "changed": sum(not torch.equal(after[name], before[name]) for name in after) / len(after),
        "weights_off": off / sum(one.numel() for one in after.values()) if exact else None,
    }
    assert metrics["skipped"] == 0, f"the step was skipped: {step}"
    assert math.isfinite(step["loss"]), f"the loss is not finite: {step}"
    assert step["changed"], f"no weight has changed: {step}"
    by, of_weights = (1e-3, 0.01) if is_first else (0.1, 0.2)  # where a model is sharp, the second amplifies rounding
    if not exact:  # other experts may be chosen
        by, of_weights = 0.3, math.inf
    is_same = abs(step["grad_norm"] / norm - 1) < by
    assert is_same, f"the gradients are not those of a plain step: {step}"
    # Where a gradient is nearly 0, rounding decides where the weight goes.
    assert (step["weights_off"] or 0) < of_weights, f"the weights are not those of a plain step: {step}"
    return step


def names_in(folder):
    """Return the names of the weights in a checkpoint."""
    with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def sampled(policy, generator):
    """Return by how much the engine's log-probabilities of its own samples differ from the trainer's: mean, in nats."""
    prompt = Prompt(index=0, text="", token_ids=(5, 40, 7))
    (group,) = generator.generate([prompt], 2)
    made = [Sample(prompt=prompt, completion=one, reward=0.0, advantage=0.0) for one in group]
    found = [
        abs(ours - theirs)
        for sample in made
        for ours, theirs in zip(
            policy.logprobs(micro_batch([sample]))[0].tolist(), sample.completion.logprobs, strict=True
        )
    ]
    return sum(found) / len(found)


def run(model, mode, plain, engines):
    """Train in one mode; return its line. `engines` keeps vLLM for the next."""
    trains, stage = mode[2:], int(mode[0])
    config, began = configured(model, trains, stage), time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model["path"])
    policy = make_policy(config, device)
    try_policy(policy, config)
    generator: Generator
    if engine == "Transformers":
        generator = TransformersGenerator(config.model, config.training, policy, tokenizer)
    elif engines:
        (generator,) = engines
        generator.sleep()  # not before the first push of all, which may not change what the engine has loaded
    else:
        from grpo_workload.generation.colocate import ColocateGenerator

        generator = ColocateGenerator(config, device)
        engines.append(generator)
    strange = {spec.name for spec in policy.merged_weights().specs} - names_in(model["path"])
    assert not strange, f"the model's checkpoint has other names: {sorted(strange)[:3]}"
    check = WeightCheck(config, tokenizer)
    taken: list[dict[str, Any]] = []
    pushed: list[float] = []
    stale: list[float] = []
    for version in range(NUM_STEPS + 1):
        if version > 0:
            before = trained(policy)
            metrics = train_on(policy, shares(samples(version)), config.training)
            expected = plain[trains][version - 1]
            taken.append(compare_step(policy, metrics, before, expected, is_first=version == 1))
        if version > 0 and engine == "vLLM":
            stale += check.differences(policy, generator).values()
            generator.sleep()
        generator.sync_weights(policy.weights(), version)
        if engine == "vLLM":
            check.run(policy, generator, version)
            assert check._last is not None
            pushed.append(check._last[1])
    arrived = all(new < old / 3 for new, old in zip(pushed[1:], stale, strict=True))
    assert arrived, f"what was pushed is not what the engine computes with: {pushed} after pushes, {stale} before"
    own = sampled(policy, generator)
    assert own < BOUNDS[config.model.dtype], f"the engine samples from something else: {own}"
    line = {name: [step[name] for step in taken] for name in taken[0]} | {"pushed": pushed, "not_pushed": stale}
    line = {name: [value and float(f"{value:.4g}") for value in values] for name, values in line.items()}
    seconds = round(time.monotonic() - began, 1)
    return {"mode": mode, "dtype": config.model.dtype, **line, "sampled": float(f"{own:.2g}"), "seconds": seconds}


gc.freeze()  # DeepSpeed collects garbage at each start, which takes a second among all that was imported
every = json.loads(models)
engines: list[Generator] = []
steps = [samples(step + 1) for step in range(NUM_STEPS)]
# Before ZeRO-3, under which transformers would divide these models too.
plain = [
    {kept: list(plain_steps(configured(model, kept, 0), steps, kind)) for kept in {mode[2:] for mode in model["modes"]}}
    for model in every
]
torch.cuda.empty_cache()  # vLLM measures what is free
for model, expected in zip(every, plain, strict=True):
    for mode in model["modes"]:
        line = {"model": Path(model["path"]).name} | run(model, mode, expected, engines)
        if os.environ["RANK"] == "0":
            with (Path(os.environ["RESULTS"]) / "lines.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        gc.collect()
for generator in engines:
    generator.close()
