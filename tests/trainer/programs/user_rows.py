"""Functions for dataset.preprocess, and a dataset for them that can be pickled."""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.prefetch import PromptLoader
from grpo_workload.data.prompt_maker import Preprocess
from grpo_workload.data.prompt_source import PromptSource

PROMPTS_PER_STEP = 3


def drawn(row):
    """Return a prompt that differs in every epoch of the dataset."""
    numbers = (random.random(), float(np.random.rand()), float(torch.rand(())))
    return row | {"prompt": f"{row['question']} {numbers}"}


def noted(row):
    """Touch a file, which shows a test that this row was prepared."""
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
    """Leave a file with the process id, and never end."""
    (Path(row["folder"]) / f"{os.getpid()}.pid").touch()
    threading.Event().wait()


def spoils(row):
    """Raise an error for one row."""
    if "spoilt" in row["question"]:
        raise ValueError("this one is spoilt")
    return {"prompt": f"Please: {row['question']}", "question": row["question"]}


def to_prompt(index, row):
    return Prompt(
        index=index,
        text=row["prompt"],
        token_ids=(index,),
        columns={name: row[name] for name in row if name != "prompt"},
    )


def make_loader(
    function, rows, folder, *, num_workers, steps=range(4), share=range(3), prefetch_steps=2, timeout_seconds=300
):
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


if __name__ == "__main__":  # a rank that waits forever for its prompts
    make_loader("hangs", [{"folder": sys.argv[1]}] * 4, sys.argv[1], num_workers=2).take(0)
