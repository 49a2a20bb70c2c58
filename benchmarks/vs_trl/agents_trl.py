"""TRL's side of `agents.py`: its GRPOTrainer with a colocated engine and a tool, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS
from benchmarks.common.metered import reward
from benchmarks.common.processes import ended_with
from benchmarks.common.runs import LOG_CHARS, JobError
from benchmarks.common.scripted import question
from benchmarks.vs_trl.agents_tool import answer
from benchmarks.vs_trl.agents_tool import query as slow_query
from benchmarks.vs_trl.trainer_rows import patch_engine

MICRO_BATCH = {"cuda": 32, "cpu": 8}
"""Sequences. On an H100, 32 are faster than 8: the rows `large` of `trainer.py`."""


async def query(sql: str, milliseconds: int) -> str:
    await asyncio.sleep(milliseconds / 1000)
    return answer(sql)


query.__doc__ = slow_query.__doc__


def settings(model: Path, folder: Path, device: str, *, longest: int, context: int) -> dict[str, Any]:
    """Return GRPOConfig's arguments. The engine keeps its memory: after a sleep, TRL pushes all weights again."""
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": MICRO_BATCH[device],
        "gradient_accumulation_steps": NUM_PROMPTS * NUM_GENERATIONS // MICRO_BATCH[device],
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": longest,
        "max_steps": 100,
        "learning_rate": 1e-6,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_enable_sleep_mode": False,
        "vllm_max_model_length": context,
        "vllm_importance_sampling_correction": False,
        "shuffle_dataset": False,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": False,  # the weights are
        "use_liger_kernel": device == "cuda" and find_spec("liger_kernel") is not None,
        "use_cpu": device == "cpu",
        "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa"},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def train(model: Path, folder: Path, device: str, warmup: int, arguments: Mapping[str, Any], *, is_async: bool) -> None:
    """Train in this process until it is killed; `folder` gets the logs of each step."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # TRL refuses several in one process
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from support.trainer.tool_template import TOOL_TEMPLATE

    class Log(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            with (folder / "logs.jsonl").open("a") as file:
                file.write(json.dumps(logs, default=str) + "\n")

    patch_engine(device)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = qwen3_template  # reads calls in the form that this chat template writes
    rows = [{"prompt": question(step, position, warmup)} for step in range(100) for position in range(NUM_PROMPTS)]
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=[reward],
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[query if is_async else slow_query],
        callbacks=[Log()],
    )
    trainer.train()


def run(
    command: list[str],
    folder: Path,
    variables: Mapping[str, str],
    steps: int,
    *,
    seconds: float,
    watch: Callable[[], int],
) -> list[dict[str, Any]]:
    """Run `command`, which trains, until `watch` has returned `steps`, and return the logs of its steps.

    No process stays. Raises JobError when it ends early or takes longer than `seconds`.
    """
    log = folder / "trl.log"
    environ = os.environ | dict(variables)
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ["PYTHONPATH"]])
    deadline = time.monotonic() + seconds
    with ended_with(), log.open("w") as file:
        job = subprocess.Popen([sys.executable, *command], env=environ, stdout=file, stderr=file)
        while (done := watch()) < steps:
            if (code := job.poll()) is not None:
                raise JobError(f"TRL ended with {code} after {done} of {steps} steps", log.read_text()[-LOG_CHARS:])
            if time.monotonic() > deadline:
                raise JobError(f"{done} of {steps} steps after {seconds:.0f} s", log.read_text()[-LOG_CHARS:])
            time.sleep(0.2)
    rows = map(json.loads, (folder / "logs.jsonl").read_text().splitlines())
    return [row for row in rows if "reward" in row]
