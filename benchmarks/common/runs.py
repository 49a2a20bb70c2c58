"""Shared by benchmarks of whole jobs: a run by `grpo run`, result lines, and the vLLM server of TRL's trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ROOT
from benchmarks.common.processes import ended_with
from support.trainer.only_rank import only_rank

# Varies within a group; otherwise nothing would be trained.
REWARDS = [{"name": "reward", "function": "benchmarks.common.metered:reward"}]
LOG_CHARS = 3000  # kept of each log of a failed job


class JobError(Exception):
    """A job did not take its steps. `reason` has a few lines; the text also has the ends of the job's logs."""

    def __init__(self, reason: str, logs: str) -> None:
        super().__init__(f"{logs}\n{reason}")
        self.reason = reason


def run_job(
    folder: Path,
    spec: dict[str, Any],
    steps: int,
    *,
    seconds: float = 600,
    least: int | None = None,
    variables: Mapping[str, str] | None = None,
    watch: Callable[[int], None] = lambda _: None,
    to_end: bool = False,
) -> list[dict[str, Any]]:
    """Run a GRPOJob below `folder` and return the metrics of its first `steps` steps.

    The job's rewards can be functions of the benchmarks' modules. Unless `to_end`, it is ended after these steps,
    because its last checkpoint would take 16 bytes for each parameter. No process stays. `variables` are added to its
    environment.
    `watch` is called five times a second with the number of finished steps.
    After `seconds`, fewer steps are enough if there are `least`.
    Raises JobError when the job ends early or takes longer than `seconds`.
    """
    output = folder / "grpo.log"
    command = [sys.executable, *job_command(folder, spec)]
    environ = os.environ | dict(variables or {})
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    deadline = time.monotonic() + seconds
    with ended_with(), output.open("w") as log:
        job = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        while len(rows := _metrics(folder)) < steps:
            if time.monotonic() > deadline:
                if least is not None and len(rows) >= least:
                    return rows
                raise _error(folder, f"{len(rows)} of {steps} steps after {seconds:.0f} s")
            watch(len(rows))
            try:
                code = job.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            if len(rows := _metrics(folder)) < steps:
                raise _error(folder, f"the job ended with {code} after {len(rows)} of {steps} steps")
        if to_end:
            try:
                code = job.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise _error(folder, f"the job has not ended after {seconds:.0f} s") from error
            if code:
                raise _error(folder, f"the job ended with {code}")
    return rows[:steps]


def job_command(folder: Path, spec: dict[str, Any]) -> list[str]:
    """Write a GRPOJob into `folder`, and return the arguments with which python runs it there."""
    head = {"apiVersion": "training.grpo.dev/v1alpha1", "kind": "GRPOJob", "metadata": {"name": "bench"}}
    (manifest := folder / "job.yaml").write_text(yaml.safe_dump(head | {"spec": spec}))
    return ["-m", "grpo_cli", "run", str(manifest), "--output", str(folder / "run")]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (
        line
        for file in folder.glob("run/*/data/*/*/*/metrics.jsonl")
        for line in file.read_text().splitlines(keepends=True)
    )
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _error(folder: Path, what: str) -> JobError:
    # Its last lines name the failed pod and the cause.
    end_of_log = (folder / "grpo.log").read_text().rstrip()[-LOG_CHARS:]
    logs = [f"--- {log}\n{log.read_text()[-LOG_CHARS:]}" for log in folder.glob("run/*/pods/*/*.log")]
    return JobError(f"{what}\n{end_of_log}", "\n".join(logs))


def measured(name: str, scratch: str, measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return what `measure` returns for a job, or the `error` that ended it, which is printed.

    `measure` gets a folder of its own in `scratch`, which is deleted before the next job.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        try:
            return measure(Path(folder))
        except JobError as error:
            print(f"FAILED {name}\n{error}", file=sys.stderr, flush=True)
            return {"error": error.reason}


def about(module: str, **options: object) -> dict[str, Any]:
    """Return the versions of what a job's trainer uses, and the command with these options."""
    command = " ".join(
        [f"python -m {module}", *(f"--{name.replace('_', '-')} {value}" for name, value in options.items())]
    )
    return {"versions": versions("torch", "vllm", "deepspeed", "transformers"), "command": command}


def set_alone() -> None:
    """Give this process the variables of the only rank of a world."""
    os.environ.update(only_rank())


def append(output: Path, line: dict[str, Any]) -> None:
    """Append a result to a file; it is written when this returns."""
    with output.open("a") as file:
        file.write(json.dumps(line) + "\n")


def commit() -> str:
    """Return the commit that runs, and whether its files are changed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")  # what a run itself writes
    return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


def versions(*packages: str) -> dict[str, str]:
    """Versions of the distributions that provide these packages: on CPUs, another one provides vLLM."""
    providers = packages_distributions()
    return {package: version(providers[package][0]) for package in packages}


def start_trl_server(
    model: str, *, port: int, context: int, cache_bytes: int, device: str, log: Path, share: float = 0.9
) -> Any:
    """Start a server as `trl vllm-serve` does, except for the size of the cache; return its process."""
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--max-model-len", str(context), "--enforce-eager", "--kv-cache-memory-bytes", str(cache_bytes)]
    command += ["--gpu-memory-utilization", str(share), "--weight-transfer-config", '{"backend": "nccl"}']
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": device, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as file:
        return subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
