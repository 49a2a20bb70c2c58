"""The configuration of a short training on a tiny model, as in a contract, and what it leaves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HUB_NAME = "org/tiny"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return what the lines of a file of a run say."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]


def make_config(model: Path | str, *, max_steps: int, engine: str = "Transformers") -> dict[str, Any]:
    """Return a configuration that rewards even token ids; `model` is a folder, or HUB_NAME."""
    return {
        "model": {"dtype": "float32"} | ({"name": model} if model == HUB_NAME else {"path": str(model)}),
        "dataset": {
            "reasoningGym": {
                "dataset": "basic_arithmetic",
                "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            }
        },
        "rewards": [
            {"name": "even", "function": "token_reward:even_tokens"},
            {"name": "stopped", "stopped": {}, "weight": 0.1},
        ],
        "training": {
            "maxSteps": max_steps,
            "promptsPerStep": 3,
            "numGenerations": 4,
            "perDeviceTrainBatchSize": 3,
            "learningRate": 1e-3,
            "lrSchedulerType": "constant",
            "maxCompletionLength": 6,
            "beta": 0.04 if model == HUB_NAME else 0.0,  # with beta > 0, a resumed run loads the base model again
            "reportTo": ["tensorboard"],
        },
        "generation": {
            "engine": engine,
            "maxModelLen": 128,
            "kvCacheMemory": "64Mi",
            "engineArgs": {"enforce_eager": True},
        },
        "storage": {"checkpointEverySteps": 1000, "keep": 1},
    }
