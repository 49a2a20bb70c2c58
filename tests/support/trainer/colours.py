"""Rows in which only the colour of an image says what is right (`programs/colour_reward.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
from PIL import Image

LEARNT = 0.8  # a mean reward that a model which ignores images cannot reach: it gets 0.5


def make_job(model: Path, dtype: str, rows: str, **training: Any) -> dict[str, Any]:
    """Return settings with which a model learns to tell them apart in some 20 steps."""
    usual = {"promptsPerStep": 6, "numGenerations": 8, "learningRate": 1e-2, "lrSchedulerType": "constant"}
    return {
        "model": {"path": str(model), "dtype": dtype},
        "dataset": {"path": rows, "dataloaderNumWorkers": 0},
        "rewards": [{"name": "colour", "function": "colour_reward:right_colour"}],
        "training": usual | {"maxCompletionLength": 2} | training,
        "generation": {"maxModelLen": 128, "kvCacheMemory": "64Mi", "engineArgs": {"enforce_eager": True}},
    }


def make_rows(folder: Path) -> str:
    """Write rows whose messages are all the same: only their images, of several sizes, say what is right.

    Two of 14 rows have no image, so that there are micro-batches without any.
    """
    sizes = [(56, 56), (90, 60), (60, 120)]
    images = [Image.new("RGB", sizes[index % 3], ("red", "blue")[index % 2]) for index in range(12)] + [None, None]
    rows = {"prompt": [[{"role": "user", "content": "Which?"}]] * len(images), "image": images}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(folder)
    return str(folder)
