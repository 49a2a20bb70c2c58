"""The sides of `agents.py` that have two GPUs, one for training and one for vLLM's server, and sample ahead."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.busy import Busy, gpu_number
from benchmarks.common.lengths import NUM_PROMPTS, write_prompts
from benchmarks.common.metered import reward
from benchmarks.common.processes import ended_with
from benchmarks.common.runs import JobError, run_job
from benchmarks.common.scripted import Script, question
from benchmarks.generation import staleness as ours
from benchmarks.vs_trl import agents_trl, async_server, async_trainer
from benchmarks.vs_trl.agents_tool import query
from grpo_cli.local.processes import free_ports
from support.trainer.tool_template import TOOL_TEMPLATE

SIDES = ("ours-server", "trl-server")


def measure(
    side: str,
    module: str,
    script: Script,
    folder: Path,
    model: Path,
    steps: int,
    device: str,
    timeout: int,
    staleness: int,
    *,
    longest: int,
    context: int,
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Run a side; return the metrics of its steps, what was set, and what was measured. Raises JobError.

    Whole cycles of steps are measured, because sampling ahead takes turns with waiting. `module` calls `train`.
    """
    from transformers import AutoTokenizer

    steps += -steps % (staleness + 1)
    warmup = ours.WARMUP + staleness  # sampling ahead begins with these
    variables = script.variables(folder / "plugin", AutoTokenizer.from_pretrained(model))
    if side == "ours-server":
        job = spec(model, folder / "prompts.jsonl", device, staleness, longest, context)
        rows, result = _ours(script, folder, job, variables, warmup, steps, device, timeout)
        return rows, job, result
    command = ["-m", module, "--side", side, "--device", device, "--model", str(model), "--folder", str(folder)]
    command += ["--staleness", str(staleness)]
    rows, result = _trl(command, folder, model, variables, context, warmup, steps, device, timeout)
    return rows, {"max_staleness": staleness, "micro_batch": async_trainer.MICRO_BATCH}, result


def spec(model: Path, prompts: Path, device: str, staleness: int, longest: int, context: int) -> dict[str, Any]:
    """Return the spec of our job: that of `staleness.py`, with the tool."""
    job = ours.spec(ours.Row.parse(f"server:lognormal:{staleness}"), device, model, prompts, longest)
    job["model"] |= {"chatTemplate": TOOL_TEMPLATE}
    job["training"] |= {"importanceSamplingCorrection": "none"}  # log-probs are of sampled tokens, not of recorded ones
    job["generation"] |= {"maxModelLen": context}
    return job | {"tools": [{"function": "benchmarks.vs_trl.agents_tool:query"}]}


def _ours(
    script: Script,
    folder: Path,
    job: dict[str, Any],
    variables: Mapping[str, str],
    warmup: int,
    steps: int,
    device: str,
    timeout: int,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run our job; return the metrics of its steps, and what was measured."""
    more = job["training"]["maxStaleness"] + 2
    write_prompts(folder / "prompts.jsonl", warmup + steps + more, lambda step, position: question(step, position, 0))
    busy = Busy(device, warmup)
    rows = run_job(folder, job, warmup + steps, seconds=timeout, variables=variables, watch=busy.look)
    return rows, _result([row["step_time"] for row in rows], [script.num_tokens] * len(rows), warmup, busy)


def _trl(
    command: list[str],
    folder: Path,
    model: Path,
    imposed: Mapping[str, str],
    context: int,
    warmup: int,
    steps: int,
    device: str,
    timeout: int,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run `command`, which trains, beside a server; return the logs of its steps, and what was measured.

    Raises JobError when it takes no such steps, or has not trained on all that its episodes have sampled.
    """
    file = folder / "steps.jsonl"
    file.touch()
    busy = Busy(device, warmup + 1)

    def look() -> int:
        done = file.read_text().count("\n")
        busy.look(done)
        return done

    with ended_with():
        (port,) = free_ports(1)
        async_server.serve(model, port, device, folder, imposed, context)
        variables = {"CUDA_VISIBLE_DEVICES": gpu_number(0), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        wanted = warmup + 1 + steps  # a measured step begins when another ends
        try:
            rows = agents_trl.run(
                [*command, "--port", str(port)], folder, variables, wanted, seconds=timeout, watch=look
            )
        except JobError as error:
            raise JobError(error.reason, f"{(folder / 'engine.log').read_text()[-3000:]}\n{error}") from error
    ends = [json.loads(line) for line in file.read_text().splitlines()][:wanted]
    for row in rows:
        bad = {name: row.get(name, 0) for name in ("rollout/fork_frac", "rollout/realign_frac")}
        if any(bad.values()) or row["tools/failure_frequency"]:
            raise JobError(f"a step has {bad}, failed calls {row['tools/failure_frequency']}", "")
    seconds = [end - begin for (begin, _), (end, _) in pairwise(ends)]
    return rows, _result(seconds, [tokens for _, tokens in ends[1:]], warmup, busy)


def _result(seconds: list[float], tokens: list[int], warmup: int, busy: Busy) -> dict[str, Any]:
    measured = seconds[warmup:]
    means = busy.means()
    return {
        "tokens_per_second": round(sum(tokens[warmup:]) / sum(measured), 1),
        "tokens": sum(tokens[warmup:]),
        "mean": {"step": round(sum(measured) / len(measured), 3)},
        "step_seconds": [round(one, 3) for one in seconds],
        "step_tokens": tokens,
        "warmup": warmup,
        "busy": means,
        "gpu_idle": [round(1 - share, 3) for share in means["gpus"]],
    }


def train(model: Path, folder: Path, port: int, device: str, staleness: int, longest: int) -> None:
    """Train with TRL's AsyncGRPOTrainer until this process is killed.

    `folder` gets the logs of each step, and when it ended and how many own tokens it has trained on.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.chat_template_utils import qwen3_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokens = async_trainer.prepare(device)

    class Log(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            last = state.global_step * async_trainer.SAMPLES
            line = [time.monotonic(), sum(tokens[last - async_trainer.SAMPLES : last])]
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            with (folder / "logs.jsonl").open("a") as file:
                file.write(json.dumps(logs, default=str) + "\n")

    arguments = async_trainer.settings(model, port, device, staleness=staleness, longest=longest, steps=100)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = qwen3_template  # reads calls in the form that this chat template writes
    rows = [{"prompt": question(step, position, 0)} for step in range(200) for position in range(NUM_PROMPTS)]
    trainer = AsyncGRPOTrainer(
        model=str(model),
        reward_funcs=[reward],
        args=AsyncGRPOConfig(**arguments | {"logging_steps": 1}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[query],
        callbacks=[Log()],
        weight_transfer=async_trainer.NoTransfer() if device == "cpu" else None,
    )
    if device == "cpu":
        async_server.wait_for(port)
    trainer.train()
