"""Tokens per second of TRL's AsyncGRPOTrainer, in rows of `benchmarks.generation.staleness`: server:LENGTHS:STALENESS.

    python -m benchmarks.vs_trl.async_trainer --row server:lognormal:4 --output out.jsonl
    python -m benchmarks.vs_trl.async_trainer --row server:lognormal:4 --tasks 128 --output out.jsonl
    python -m benchmarks.generation.staleness --summary out.jsonl

The same model, prompts, lengths, vLLM arguments and numbers of completions; a step trains on 64 completions in
micro-batches of 16, about as many tokens as ours packs. The trainer has the first GPU, vLLM's server the second.
TRL's `max_staleness` drops what is older, and decides how many requests it has in flight, 64 x STALENESS, unless
`--tasks` does. TRL's attention takes a kernel from the hub; here it calls PyTorch's kernel for packed sequences, which
ours uses too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from benchmarks.common.busy import Busy, gpu_number
from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS, PROMPT_TOKENS, Lengths, prompt
from benchmarks.common.models import make_model
from benchmarks.common.processes import ended_with
from benchmarks.common.runs import about, append, versions
from benchmarks.generation.staleness import ENGINES, LONGEST, SCALES, WARMUP, Row, host
from benchmarks.vs_trl import async_server
from benchmarks.vs_trl.varlen_attention import Attention
from grpo_cli.local.processes import free_ports

MICRO_BATCH = 16
SAMPLES = NUM_PROMPTS * NUM_GENERATIONS


@click.command()
@click.option("--row", "name", required=True, help="server:LENGTHS:STALENESS, with a staleness of 1 or more.")
@click.option("--steps", default=6, show_default=True, help="Measured steps.")
@click.option("--tasks", default=-1, show_default=True, help="TRL's max_inflight_tasks; -1: TRL decides.")
@click.option("--size", default="1.5", show_default=True)
@click.option("--device", type=click.Choice(list(ENGINES)), default="cuda", show_default=True)
@click.option("--timeout", default=240, show_default=True, help="Longest time for the row, in seconds.")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of the random model; made if missing.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("async.jsonl"), show_default=True)
@click.option("--port", type=int, hidden=True)
def main(
    name: str,
    steps: int,
    tasks: int,
    size: str,
    device: str,
    timeout: int,
    model: Path | None,
    output: Path,
    port: int | None,
) -> None:
    """Run one row in a process of its own, next to its vLLM server."""
    row = Row.parse(name)
    if row.topology != "server" or row.staleness < 1:
        raise click.UsageError(f"--row {name}: TRL has server:LENGTHS:STALENESS with a staleness of 1 or more")
    if port is not None:
        assert model is not None
        sys.exit(train(row, model, port, steps, tasks, size, device, output))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch, ended_with():
        folder = Path(scratch)
        model = make_model(model or folder / "model", size, device, kind="qwen2", max_length=4096).resolve()
        (port,) = free_ports(1)
        imposed = Lengths(kind=row.lengths, scale=SCALES[device]).variables(folder / "plugin")
        async_server.serve(model, port, device, folder, imposed)
        command = [sys.executable, "-m", "benchmarks.vs_trl.async_trainer", "--row", name, "--steps", str(steps)]
        command += [
            "--tasks",
            str(tasks),
            "--size",
            size,
            "--device",
            device,
            "--model",
            str(model),
            "--output",
            str(output.resolve()),
        ]
        log = folder / "trainer.log"
        with log.open("w") as file:
            job = subprocess.Popen(
                [*command, "--port", str(port)],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu_number(0), "PYTHONPATH": async_server.import_path()},
                stdout=file,
                stderr=file,
            )
            try:
                code = job.wait(timeout)
            except subprocess.TimeoutExpired:
                code = -1
        for file_ in (log, folder / "engine.log") if code else ():
            print(f"--- {file_.name}\n{file_.read_text()[-6000:]}")
    sys.exit(code)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that varies within each group, whatever was sampled."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


class NoTransfer:
    """On CPUs: TRL sends weights by NCCL alone."""

    def init_weight_transfer(self) -> None:
        """Wait for the server."""

    def pause(self) -> None:
        """Do nothing."""

    def send_weights(self, iterator: Any) -> None:
        """Use up the weights."""
        for _ in iterator:
            pass

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing."""


def settings(model: Path, port: int, device: str, *, staleness: int, longest: int, steps: int) -> dict[str, Any]:
    """Return AsyncGRPOConfig's arguments."""
    return {
        "output_dir": tempfile.mkdtemp(dir=model.parent),
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": SAMPLES // MICRO_BATCH,
        "token_budget": -1,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": longest,
        "max_steps": steps,
        "max_staleness": staleness,
        "learning_rate": 1e-6,
        "max_grad_norm": 1.0,
        "bf16": False,  # the weights are bfloat16, as ours
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "vllm_server_base_url": f"http://127.0.0.1:{port}",
        "use_cpu": device == "cpu",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def prepare(device: str) -> list[int]:
    """Let TRL's trainer run here: on a CPU, and without a kernel of the hub.

    Returns a list that gets the number of own tokens of each sequence that is given to the trainer.
    """
    from trl.experimental.async_grpo import async_grpo_trainer, packing
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

    packing._flash_attn = lambda: Attention
    if device == "cpu":
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12  # it asks a GPU for its name
    tokens: list[int] = []
    collate = DataCollatorForRollout.torch_call

    def counted(collator: Any, examples: Any) -> Any:
        tokens.extend(int(one["completion_mask"].sum()) for rows in examples for row in rows for one in row.samples)
        return collate(collator, examples)

    DataCollatorForRollout.torch_call = counted
    return tokens


def train(row: Row, model: Path, port: int, steps: int, tasks: int, size: str, device: str, output: Path) -> int:
    """Train in this process, and append the result."""
    import psutil
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.chat_template_utils import qwen3_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokens = prepare(device)  # of completions, in micro-batches given to the trainer so far
    ends: list[tuple[float, int]] = []  # of steps: when, and how many completions were trained on by then
    warmup = WARMUP + row.staleness
    busy = Busy(device, 0)
    history: list[dict[str, Any]] = []

    def finish() -> None:
        (first, begun), (last, ended) = ends[warmup], ends[-1]
        measured = tokens[begun:ended]
        line: dict[str, Any] = {"row": f"trl-async:{row.lengths}:{row.staleness}", "size": size, "device": device}
        line |= {
            "tokens_per_second": round(sum(measured) / (last - first)),
            "tokens": sum(measured),
            "mean": {"step_time": (last - first) / steps, "completions/mean_length": fmean(measured)},
            "warmup": warmup + 1,
            "step_seconds": [round(end - begin, 3) for (begin, _), (end, _) in pairwise(ends)],
            "busy": busy.means(),
            "logs": history,
            "host": host(device),
        }
        line |= about(
            "benchmarks.vs_trl.async_trainer", row=row.name, steps=steps, tasks=tasks, size=size, device=device
        )
        line["versions"] |= versions("trl")
        append(output, json.loads(json.dumps(line, default=str)))
        os._exit(0)  # its own end waits for what is in flight

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            ends.append((time.monotonic(), SAMPLES * (len(ends) + 1)))
            if len(ends) > warmup:
                busy.look(len(ends))
            elif len(ends) == warmup:
                psutil.cpu_percent(percpu=True)
            if len(ends) == warmup + steps + 1:
                finish()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            history.append(logs)

    scale = SCALES[device]
    config = AsyncGRPOConfig(
        **settings(
            model, port, device, staleness=row.staleness, longest=int(LONGEST * scale), steps=warmup + steps + 1
        ),
        max_inflight_tasks=tasks,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = qwen3_template  # TRL wants one
    rows = [prompt(step, position) for step in range(200) for position in range(NUM_PROMPTS)]
    assert {len(tokenizer(text)["input_ids"]) for text in rows} == {PROMPT_TOKENS}
    trainer = AsyncGRPOTrainer(
        model=str(model),
        reward_funcs=[reward],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in rows]),
        processing_class=tokenizer,
        callbacks=[Clock()],
        weight_transfer=NoTransfer() if device == "cpu" else None,
    )
    if device == "cpu":
        async_server.wait_for(port)
    trainer.train()
    return 1  # it ended before the measured steps did


if __name__ == "__main__":
    main()
