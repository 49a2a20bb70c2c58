"""A training step of our trainer and one of TRL's on one GPU: same model, prompts, completion lengths, loss and vLLM.

    python -m benchmarks.vs_trl.trainer --rows trl-equal,ours-equal --output results.jsonl
    python -m benchmarks.vs_trl.trainer --summary results.jsonl

A row is SIDE-LENGTHS[-OPTION...]. Sides: trl, ours. Lengths: equal, lognormal. Options:
  corrected   sequence-level importance sampling with masking (TRL's default)
  bypass      ours: the engine's log-probabilities are the old ones
  fp32        float32 masters (TRL: a float32 model under bfloat16 autocast); otherwise weights and AdamW are bfloat16
  nockpt      without gradient checkpointing
  autocast    TRL's default for a bfloat16 model, which adds casts
  flex        TRL with PyTorch's flex attention, which skips padding, in place of sdpa
  norng       TRL without saving random states for each checkpointed layer, as ours when nothing is drawn
  large       TRL with micro-batches of 32 sequences in place of 8
  expandable  TRL with PyTorch's expandable segments, which ours sets itself
  uncapped    ours with micro-batches of 8192 tokens in place of 8 sequences
  default     ours with micro-batches as large as memory allows: its default
  liger       TRL with Liger's layer kernels, where they are installed; noliger: ours without them
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.common.busy import Busy
from benchmarks.common.models import make_model
from benchmarks.common.processes import ended_with
from benchmarks.vs_trl.trainer_rows import Row
from benchmarks.vs_trl.trainer_table import as_table

WARMUP = 1
LOOK_SECONDS = 0.2


@click.command()
@click.option("--rows", help="Rows to run, separated by commas.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("trainer.jsonl"),
    help="File to which a line is appended for each row.",
)
@click.option("--steps", default=5, help="Measured steps of a row.")
@click.option("--size", default="1.5", help="Billions of parameters, or tiny.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--timeout", default=240, help="Longest time for one row, in seconds.")
@click.option("--profile", is_flag=True, help="Also write a profile of one more step of each row next to the output.")
@click.option(
    "--set", "changes", multiple=True, help="A setting of our job, for example training.maxTokensPerMicroBatch=16384."
)
@click.option(
    "--summary", type=click.Path(exists=True, path_type=Path), help="Print a file of rows as a table and exit."
)
@click.option("--row", hidden=True)
@click.option("--model", hidden=True, type=click.Path(path_type=Path))
def main(
    rows: str | None,
    output: Path,
    steps: int,
    size: str,
    device: str,
    timeout: int,
    profile: bool,
    changes: tuple[str, ...],
    summary: Path | None,
    row: str | None,
    model: Path | None,
) -> None:
    """Run rows one after the other, each in its own process."""
    if summary is not None:
        print(as_table([json.loads(line) for line in summary.read_text().splitlines()]))
    elif row is not None:
        assert model is not None
        measure(Row.parse(row, changes), model, output.resolve(), steps, size, device, profile)
    elif rows is not None:
        sys.exit(drive([Row.parse(name, changes).name for name in rows.split(",")], output, size, device, timeout))
    else:
        raise click.UsageError("one of --rows and --summary is needed")


def drive(rows: list[str], output: Path, size: str, device: str, timeout: int) -> int:
    """Run the rows; return how many failed."""
    failed = 0
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = make_model(Path(scratch) / "model", size, device, kind="qwen2", max_length=4096)
        for row in rows:
            command = [sys.executable, *sys.argv, "--row", row, "--model", str(model)]
            allocator = (
                {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if "expandable" in row.split("-") else {}
            )
            log = Path(scratch) / f"{row}.log"
            with ended_with(), log.open("w") as file:
                try:
                    code = subprocess.run(
                        command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        timeout=timeout,
                        env=os.environ | allocator,
                        check=False,
                    ).returncode
                except subprocess.TimeoutExpired:
                    code = -1
            if code:
                failed += 1
                print(f"FAILED {row} ({code})\n{log.read_text()[-4000:]}", flush=True)
            else:
                print(output.read_text().splitlines()[-1][:400], flush=True)
    return failed


def measure(row: Row, model: Path, output: Path, steps: int, size: str, device: str, profile: bool) -> None:
    """Measure one row in this process; the process ends with it."""
    from benchmarks.common.lengths import lengths
    from benchmarks.common.metered import Meter

    def finish(results: dict[str, Any]) -> None:
        settings = {"size": size, "micro_batch": row.micro_batch, "warmup": WARMUP, "set": row.changes}
        settings["cores"] = len(os.sched_getaffinity(0))
        command = (
            f"python -m benchmarks.vs_trl.trainer --rows {row.name} --steps {steps} --size {size} --device {device}"
        )
        command += "".join(f" --set {change}" for change in row.changes)
        training = history()[WARMUP : WARMUP + steps]
        with output.open("a") as file:
            file.write(
                json.dumps(
                    {
                        "row": row.name,
                        **results,
                        "busy": busy.means(),
                        "training": training,
                        "settings": settings,
                        "command": command,
                    }
                )
                + "\n"
            )

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # TRL refuses several in one process
    wanted = lengths(row.lengths, 1 / 32 if size == "tiny" else 1.0)
    train, history = row.prepare(model, device, longest=64 if size == "tiny" else 2048)
    file = Path(f"{output}.{row.name}.profile.txt") if profile else None
    meter = Meter(wanted, warmup=WARMUP, steps=steps, finish=finish, profile=file)
    meter.install()
    busy = Busy(device, WARMUP)

    def look() -> None:
        while True:
            busy.look(meter.finished_steps)
            time.sleep(LOOK_SECONDS)

    threading.Thread(target=look, daemon=True).start()
    train()
    sys.exit("training ended before the measured steps did")


if __name__ == "__main__":
    main()
