"""A step of several trainers on one GPU: same random model, prompts, lengths of completions, engine and clock.

    python -m benchmarks.vs_field.trainer --side ours --side trl --runs 3 --output field.jsonl
    python -m benchmarks.vs_field.trainer --side verl --path verl=FOLDER/verl --lengths equal --output field.jsonl
    python -m benchmarks.vs_field.trainer --side ms-swift --device cpu --size tiny --output smoke.jsonl  # no figures
    python -m benchmarks.vs_field.trainer --side ours --side trl --steps 1 --profile --output profile.jsonl
    python -m benchmarks.vs_field.trainer --summary field.jsonl

Sides: this project, TRL, ms-swift and verl (`sides.py` has their settings). Each is installed in this environment, or
in a folder that `--path` puts before it: `pack.sh` makes those of the last two. A step trains on 64 completions of 8
prompts with 256 bytes, without a reference model, with weights and AdamW's moments in bfloat16, and gradient
checkpointing. vLLM's scheduler gives the n-th request of a step the n-th recorded length, and writes when a step's
first request came and its last one ended (`clock.py`), the same for all sides. A step lasts from its first request to
the first of the next one. ms-swift and verl get PyTorch's attention under flash-attn's name (`flash_attn.py`).

A line has the seconds of each step and of its samples, tokens per second, the peak of memory on the GPU as NVML counts
it, and the share of the GPU's arithmetic (989 TFLOP/s) that 6 operations for each weight and trained token are. With
`--profile` it also has the kernels of one step (`profile.py`), whose seconds are no measure then.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.common.lengths import PROMPT_TOKENS, lengths
from benchmarks.common.models import make_model
from benchmarks.common.processes import ended_with
from benchmarks.common.runs import JobError, about, append, measured
from benchmarks.vs_field import clock, flash_attn, profile
from benchmarks.vs_field.sides import SIDES

MODULE = "benchmarks.vs_field.trainer"
WARMUP = 2
GIB = 2**30
PEAK_FLOPS = 989e12  # of an H100 in bfloat16, without sparsity
# fmt: off
PACKAGES = {"torch", "triton", "transformers", "vllm", "accelerate", "deepspeed", "liger_kernel", "peft", "trl",
    "ms_swift", "verl", "ray", "tensordict", "TransferQueue", "grpo_operator"}
# fmt: on
LOG_LINES = 40  # shown of each log of a side that failed


@click.command(help=__doc__)
@click.option("--side", type=click.Choice(list(SIDES)), multiple=True)
@click.option("--lengths", "kind", type=click.Choice(["equal", "lognormal"]), default="lognormal", show_default=True)
@click.option("--steps", default=5, show_default=True, help="Measured steps of a side.")
@click.option("--runs", default=1, show_default=True, help="Runs of each side, one after the other.")
@click.option("--path", multiple=True, help="NAME=FOLDER: packages of one side, which come before all others.")
@click.option("--set", "changes", multiple=True, help="A further argument of the side, such as verl's a.b=c.")
@click.option("--size", default="1.5", show_default=True, help="Billions of parameters, or tiny.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--profile", "profiles", is_flag=True, help="Profile the first measured step.")
@click.option("--timeout", default=300, show_default=True, help="Longest time of a run, in seconds.")
@click.option("--output", type=click.Path(path_type=Path))
@click.option("--summary", type=click.Path(exists=True, path_type=Path), help="Print results as a table and exit.")
def main(output: Path | None, summary: Path | None, side: tuple[str, ...], runs: int, **options: Any) -> None:
    if summary is not None:
        lines = [json.loads(line) for line in summary.read_text().splitlines()]
        click.echo(as_table(lines))
        if any("profile" in line for line in lines):
            click.echo(profile.as_table(lines))
        return
    if output is None or not side:
        raise click.UsageError("--side and --output, or --summary, are needed")
    if options["profiles"] and "verl" in side:
        raise click.UsageError("--profile sees one process, and verl samples in another one than it trains in")
    failed, device, kind = 0, options["device"], options["kind"]
    paths = dict(one.split("=", 1) for one in options.pop("path"))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = make_model(Path(scratch) / "model", options["size"], device, kind="qwen2", max_length=4096)
        for _ in range(runs):
            for one in side:
                line: dict[str, Any] = {"side": one, "lengths": kind, "size": options["size"], "device": device}
                line |= {"changes": options["changes"]}

                def measure(folder: Path, one: str = one) -> dict[str, Any]:
                    log = output.with_name(f"{output.name}.{one}-{kind}.log").resolve()
                    return run(one, model.resolve(), folder, paths.get(one), log, **options)

                line |= measured(one, scratch, measure)
                failed += "error" in line
                line |= about(
                    MODULE, side=one, lengths=kind, **{one: options[one] for one in ("steps", "size", "device")}
                )
                line["versions"] = _versions(paths.get(one))
                append(output, line)
                click.echo(as_table([line]))
    sys.exit(failed)


def run(
    side: str,
    model: Path,
    folder: Path,
    path: str | None,
    log: Path,
    *,
    changes: tuple[str, ...],
    kind: str,
    steps: int,
    size: str,
    device: str,
    timeout: int,
    profiles: bool,
) -> dict[str, Any]:
    """Run a side until it has taken its steps; return what was measured. Raises JobError."""
    scale = 1 / 32 if size == "tiny" else 1.0
    wanted, waves = lengths(kind, scale), folder / "waves.jsonl"
    waves.touch()
    (own := folder / "packages").mkdir()
    if side in ("ms-swift", "verl"):
        flash_attn.install(own)
    environ = os.environ | clock.variables(folder / "plugin", wanted, waves, WARMUP if profiles else None)
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(own), path, environ["PYTHONPATH"]]))}
    environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "MODELSCOPE_CACHE": str(folder / "hub")}
    command = [sys.executable, *SIDES[side](model, folder, device, 64 if size == "tiny" else 2048), *changes]
    deadline, used = time.monotonic() + timeout, list[int]()
    with ended_with(), log.open("w") as out:
        started = subprocess.Popen(command, env=environ, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        while (done := _begun(waves)) <= WARMUP + steps:
            if started.poll() is not None or time.monotonic() > deadline:
                logs = [log, *folder.glob("run/*/pods/*/*.log")]
                ends = ["\n".join(one.read_text(errors="replace").splitlines()[-LOG_LINES:]) for one in logs]
                why = f"{timeout} s were over" if started.poll() is None else f"it ended with {started.returncode}"
                raise JobError(f"{done} steps began, then {why}: see {log}", "\n---\n".join(ends))
            if device == "cuda" and done > WARMUP:
                used.append(_used())
            time.sleep(0.1)
    settings = [part.replace(str(folder), "FOLDER") for part in command[1:]]
    events = [json.loads(line) for line in waves.read_text().splitlines()]
    found = summarise(events, wanted, size)
    found |= next(({"profile": one["profile"]} for one in events if "profile" in one), {})
    return {**found, "said": said(log.read_text(errors="replace"), steps), "settings": settings} | (
        {"memory_gib": round(max(used) / GIB, 2), "load": os.getloadavg()[0], "cpus": os.cpu_count()} if used else {}
    )


def said(log: str, steps: int) -> dict[str, float]:
    """Return the median seconds of each part of the last steps, as verl's log has them: an explanation, no measure."""
    parts: dict[str, list[float]] = {}
    for part, seconds in re.findall(r"timing_s/(\w+):([\d.]+)", log):
        parts.setdefault(part, []).append(float(seconds))
    return {part: round(statistics.median(seconds[-steps:]), 3) for part, seconds in parts.items()}


def summarise(events: list[dict[str, Any]], wanted: list[int], size: str) -> dict[str, Any]:
    """Return the seconds of the measured steps from the waves' begins and ends. Raises JobError for other lengths."""
    begins = [one["begin"] for one in events if "begin" in one]
    ends = [one for one in events if "end" in one][: len(begins) - 1]
    if bad := {one["tokens"] for one in ends} - {sum(wanted)}:
        raise JobError(f"steps of {bad} tokens, not {sum(wanted)}", "")
    steps = [after - before for before, after in pairwise(begins)][WARMUP:]
    sampling = [end["end"] - begin for begin, end in zip(begins, ends, strict=False)][WARMUP:]
    step = statistics.median(steps)
    trained = sum(wanted) + len(wanted) * PROMPT_TOKENS
    return {
        "seconds": {"step": [round(one, 3) for one in steps], "sampling": [round(one, 3) for one in sampling]},
        "median": {
            "step": round(step, 3),
            "sampling": round(statistics.median(sampling), 3),
            "rest": round(statistics.median(a - b for a, b in zip(steps, sampling, strict=True)), 3),
        },
        "tokens_per_second": round(sum(wanted) / step, 1),
        "mfu": round(6 * float(size) * 1e9 * trained / step / PEAK_FLOPS, 4) if size != "tiny" else None,
    }


def _begun(waves: Path) -> int:
    return waves.read_text().count('"begin"')


def _used() -> int:
    import pynvml

    from benchmarks.common.busy import gpu_handles

    return int(pynvml.nvmlDeviceGetMemoryInfo(gpu_handles()[0]).used)


def _versions(path: str | None) -> dict[str, str]:
    """Versions of what a side may run; those in its own folder hide others."""
    found: dict[str, str] = {}
    for one in [*(distributions(path=[path]) if path else ()), *distributions()]:
        if (name := one.metadata["Name"].replace("-", "_")) in PACKAGES:
            found.setdefault(name, one.version)
    return found


def as_table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table of lines, with the ratio of each step to the median of our runs of the same shape."""
    ours = defaultdict[Any, list[float]](list)
    for line in lines:
        if line["side"] == "ours" and "median" in line:
            ours[_shape(line)].append(line["median"]["step"])
    table = [
        "| side | lengths | step s | sampling s | rest s | tokens/s | MFU | GiB | step / ours |",
        "|" + " --- |" * 9,
    ]
    for line in lines:
        if "error" in line:
            table.append(f"| {line['side']} | {line['lengths']} | failed: {line['error'].splitlines()[0]} |" + " |" * 6)
            continue
        median = line["median"]
        ratio = f"{median['step'] / statistics.median(runs):.2f}" if (runs := ours.get(_shape(line))) else ""
        share = "" if line["mfu"] is None else f"{line['mfu']:.1%}"
        cells = [line["side"], line["lengths"], *(f"{median[part]:.2f}" for part in ("step", "sampling", "rest"))]
        cells += [f"{line['tokens_per_second']:,.0f}", share, str(line.get("memory_gib", "")), ratio]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def _shape(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("lengths", "size", "device"))


if __name__ == "__main__":
    main()
