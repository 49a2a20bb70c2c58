"""Jobs whose step is one micro-batch of one long sequence, and their plans."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

GIB = 2**30
NOT_ALLOCATED = ("CUDA context", "NCCL")
"""Parts of a plan that torch does not allocate."""


def contract(
    folder: Path, device: str, tokens: int, parallelism: dict[str, Any], lora: dict[str, Any] | None, gpus: int = 1
) -> Any:
    """Return the contract of a job on one pod, which trains the model in `folder` on a sequence of `tokens`."""
    from grpo_spec.contract import Contract

    config: dict[str, Any] = {
        "model": {"path": str(folder)},
        "dataset": {"path": "unused"},
        "rewards": [{"name": "unused", "stopped": {}}],
        "training": {
            "importanceSamplingCorrection": "none",
            "promptsPerStep": 1,
            "numGenerations": 2,
            "perDeviceTrainBatchSize": 1,
            "maxCompletionLength": tokens - 1,
        },
        "parallelism": {"gradientCheckpointing": True} | parallelism,
        "generation": {"engine": "Transformers", "maxModelLen": tokens},
    }
    return Contract.model_validate(
        {
            "job": {"namespace": "n", "name": "j", "uid": "u"},
            "attempt": 0,
            "device": device,
            "durable": True,
            "members": [{"pod": "p-0", "group": "g", "host": "h", "gpus": gpus, "rankOffset": 0}],
            "config": config | ({} if lora is None else {"lora": lora}),
        }
    )


def planned(job: Any, total: int) -> dict[str, Any]:
    """Return what is planned for training on the first of GPUs of `total` bytes, as fields of a result's line."""
    from grpo_workload.capacity.parts import TRAIN
    from grpo_workload.capacity.plan import plan
    from grpo_workload.capacity.shapes import Models

    phase = plan(job, total, Models()).gpus[0].phases[TRAIN]
    allocated = sum(size for part, size in phase.items() if part not in NOT_ALLOCATED)
    parts = {part: round(size / GIB, 3) for part, size in phase.items() if size}
    return {"planned_gib": round(allocated / GIB, 3), "parts_gib": parts}


def timed_step(policy: Any, tokens: int) -> tuple[float, dict[str, float]]:
    """Take an optimizer step on one sequence of random tokens; return its seconds and its metrics."""
    import torch

    from grpo_workload.algorithm.loss import LossScale
    from grpo_workload.capacity.meta_pass import batch_of

    begin = time.monotonic()
    scale = LossScale(num_sequences=1, num_tokens=tokens)
    metrics = policy.step([batch_of(tokens, tokens, "cpu")], 1, scale)
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - begin, metrics
