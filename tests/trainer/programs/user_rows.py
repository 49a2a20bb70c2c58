"""What users name in dataset.preprocess, and a dataset for it that pickles."""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from grpo_workload.prefetch import PromptLoader
from grpo_workload.prompt_making import Preprocess
from grpo_workload.tasks import PromptSource
from grpo_workload.types import Prompt

PROMPTS_PER_STEP = 3


def drawn(row):
    """Different in every epoch, and nothing else."""
    numbers = (random.random(), float(np.random.rand()), float(torch.rand(())))
    return row | {"prompt": f"{row['question']} {numbers}"}


def noted(row):
    """Leaves a file, by which a test sees which rows are prepared."""
    (Path(row["folder"]) / row["question"]).touch()
    return {"prompt": row["question"]}


def faulty(row):
    match row["fault"]:
        case "raises":
            return {"prompt": row["missing"]}
        case "no network":
            raise ConnectionError("no route to host")
        case "no prompt":
            return {"answer": 3}
        case "no row":
            return None
        case "does not pickle":
            return {"prompt": "a", "answers": (number for number in range(3))}
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return {"prompt": "fine"}


def hangs(row):
    """Leaves its process's number, and never ends."""
    (Path(row["folder"]) / f"{os.getpid()}.pid").touch()
    threading.Event().wait()


def spoils(row):
    """Raises at one row."""
    if "spoilt" in row["question"]:
        raise ValueError("this one is spoilt")
    return {"prompt": f"Please: {row['question']}", "question": row["question"]}


def to_prompt(index, row):
    return Prompt(index=index, text=row["prompt"], token_ids=(index,), columns={name: row[name] for name in row if name != "prompt"})


def make_loader(function, rows, folder, *, num_workers, steps=range(4), share=range(3), prefetch_steps=2, timeout_seconds=300):
    source = PromptSource(rows, to_prompt, seed=5, preprocess=Preprocess(f"user_rows:{function}"))
    return PromptLoader(
        source,
        share=share,
        prompts_per_step=PROMPTS_PER_STEP,
        steps=steps,
        num_workers=num_workers,
        prefetch_steps=prefetch_steps,
        timeout_seconds=timeout_seconds,
        folder=Path(folder),
    )


if __name__ == "__main__":  # a rank that waits for prompts that never come
    make_loader("hangs", [{"folder": sys.argv[1]}] * 4, sys.argv[1], num_workers=2).take(0)
