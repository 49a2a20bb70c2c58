"""Bytes that a rank reduces in an optimizer step with and without parallelism.coalesceGradReduction, ZeRO-2 and ZeRO-3.

    python -m benchmarks.training.grad_reduction

Two ranks on CPUs over gloo, a random model, eight micro-batches per rank. The count covers the bytes that DeepSpeed
hands to reducing collectives, a property of its algorithm and not of the machine. The peak of gradients counts the
tensors that are alive after the last backward pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

MICRO_BATCHES, RANKS = 8, 2
CASES = [(2, False), (2, True), (3, False), (3, True)]


def run_rank(model: str, out: str) -> None:
    """Take a step of each case and count."""
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device.CPU, os.environ)
    import deepspeed.comm as comm
    from accelerate.state import AcceleratorState

    from grpo_spec.trainer import TrainerConfig
    from grpo_workload.algorithm.samples import Completion, Prompt, Sample
    from grpo_workload.algorithm.step_plan import Fact, plan
    from grpo_workload.policy.step.policy import Policy
    from grpo_workload.training.exchange import micro_batches

    counted = {"bytes": 0, "calls": 0}
    for name in (
        "all_reduce",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_fn",
        "reduce_scatter_tensor",
        "all_to_all_single",
    ):
        plain = getattr(comm, name, None)
        if plain is not None:
            setattr(comm, name, counting(plain, counted))
    rank = int(os.environ["RANK"])
    results = []
    for stage, coalesces in CASES:
        config = TrainerConfig.model_validate(
            {
                "model": {"path": model, "dtype": "bfloat16"},
                "dataset": {"path": "unused"},
                "rewards": [{"name": "unused", "stopped": {}}],
                "training": {"perDeviceTrainBatchSize": 1, "importanceSamplingCorrection": "none"},
                "parallelism": {"zeroStage": stage, "coalesceGradReduction": coalesces},
            }
        )
        policy = Policy(config, Device.CPU, timeout_seconds=100, pad_token_id=2)
        parameters = sum(getattr(one, "ds_numel", one.numel()) for one in policy.module.parameters())
        answer = Completion(token_ids=(5, 6, 7), logprobs=(-5.0,) * 3, text="", finish_reason="stop", weight_version=0)
        sample = Sample(prompt=Prompt(index=0, text="", token_ids=(8, 9)), completion=answer, reward=1.0, advantage=0.5)
        work = plan([[Fact(2, 3, False, 1.0, 0.5)] * MICRO_BATCHES] * RANKS, config.training)
        policy.step(micro_batches(work, [sample] * MICRO_BATCHES, rank), work.num_micro_batches, work.scale)
        counted.update(bytes=0, calls=0)
        policy.step(micro_batches(work, [sample] * MICRO_BATCHES, rank), work.num_micro_batches, work.scale)
        results.append({"zeroStage": stage, "coalesceGradReduction": coalesces, "parameters": parameters, **counted})
        AcceleratorState._reset_state(reset_partial_state=True)
    if rank == 0:
        Path(out).write_text(json.dumps(results))


def counting(plain: Any, counted: dict[str, int]) -> Any:
    """Wrap `plain` so that the bytes of its largest tensor argument are counted."""

    def collective(*args: Any, **options: Any) -> Any:
        import torch

        flat = [
            one
            for value in (*args, *options.values())
            for one in (value if isinstance(value, list | tuple) else [value])
        ]
        counted["bytes"] += max(
            (one.numel() * one.element_size() for one in flat if isinstance(one, torch.Tensor)), default=0
        )
        counted["calls"] += 1
        return plain(*args, **options)

    return collective


def main() -> None:
    """Start the ranks and print their counts."""
    with tempfile.TemporaryDirectory() as scratch:
        from support.trainer.tiny_model import make_tiny_model

        model, out = make_tiny_model(Path(scratch) / "model", heads=8), Path(scratch) / "out.json"
        environ = {
            **os.environ,
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29533",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "benchmarks.training.grad_reduction", str(model), str(out)]
        ranks = [
            subprocess.Popen(command, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(RANKS)
        ]
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")
        for row in json.loads(out.read_text()):
            row["bytes_a_parameter"] = round(row["bytes"] / row["parameters"], 2)
            settings = {"micro_batches": MICRO_BATCHES, "ranks": RANKS, "deepspeed": version("deepspeed")}
            print(json.dumps(row | settings))


if __name__ == "__main__":
    run_rank(*sys.argv[1:]) if len(sys.argv) > 1 else main()
