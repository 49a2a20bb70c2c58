"""Two optimizer steps on fixed samples, for each ZeRO stage asked for: steps.py MODEL OUT MICRO_BATCH_SIZE BETA STAGE..."""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import sys

from grpo_workload import environment
from grpo_workload.contract import Device

environment.prepare(Device.CPU, os.environ)

import torch
from accelerate.state import AcceleratorState

from grpo_workload.batching import local_scale, micro_batches, num_micro_batches, shard
from grpo_workload.collectives import add_scales
from grpo_workload.config import TrainerConfig
from grpo_workload.engine import Policy
from grpo_workload.types import Completion, Prompt, Sample

NUM_PROMPTS, NUM_GENERATIONS = 5, 3  # over 3 ranks: shares of 2, 2 and 1 prompts
PAD = 2


def samples(step):
    random = torch.Generator().manual_seed(step)

    def tokens(low, high):
        length = int(torch.randint(low, high, (), generator=random))
        return tuple(torch.randint(3, 250, (length,), generator=random).tolist())

    for index in range(NUM_PROMPTS):
        prompt = Prompt(index=index, text="", token_ids=tokens(3, 12))
        for _ in range(NUM_GENERATIONS):
            ids = tokens(1, 9)
            completion = Completion(token_ids=ids, logprobs=(-5.0,) * len(ids), text="", finish_reason="stop", weight_version=0)
            yield Sample(prompt=prompt, completion=completion, reward=1.0, advantage=float(torch.randn((), generator=random)))


def main(model, out, micro_batch_size, beta, stages):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = shard(NUM_PROMPTS, world_size, rank)
    count = num_micro_batches(NUM_PROMPTS, NUM_GENERATIONS, world_size, micro_batch_size)
    results = {}
    for stage in stages:
        config = TrainerConfig.model_validate(
            {
                "model": {"path": model, "dtype": "float32"},
                "dataset": {"path": "unused"},
                "rewards": [{"name": "unused", "stopped": {}}],
                "training": {"perDeviceTrainBatchSize": micro_batch_size, "learningRate": 1e-3, "maxGradNorm": 0.5, "beta": beta},
                "parallelism": {"zeroStage": stage, "gradientCheckpointing": stage == 2},
            }
        )
        policy = Policy(config, Device.CPU, timeout_seconds=300, pad_token_id=PAD)
        metrics = []
        for step in range(2):
            own = list(samples(step))[share.start * NUM_GENERATIONS : share.stop * NUM_GENERATIONS]
            batches = micro_batches(own, micro_batch_size, PAD, num_micro_batches=count)
            metrics.append(policy.step(batches, add_scales(local_scale(batches), policy.device)))
        results[stage] = {"metrics": metrics, "weights": {name: weight.clone() for name, weight in policy.weights()}}
        AcceleratorState._reset_state(reset_partial_state=True)
    if rank == 0:
        torch.save(results, out)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), [int(stage) for stage in sys.argv[5:]])
