"""What tests on GPUs run: a whole job by `grpo run`, or the parts of a rank in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from grpo_workload.ranks import environment
from grpo_workload.spec.contract import Device
from support.paths import PROGRAMS
from support.trainer.launchers import free_ports


def run_on_gpu(folder: Path, spec: dict[str, Any], *, seconds: float = 300) -> list[dict[str, Any]]:
    """Run a job with one trainer pod of one GPU below `folder` to its end; return the metrics of its steps."""
    head = {"apiVersion": "training.grpo.dev/v1alpha1", "kind": "GRPOJob", "metadata": {"name": "job"}}
    whole = {"device": {"type": "cuda"}, "trainer": {"groups": [{"name": "t", "gpus": 1}]}} | spec
    (folder / "job.yaml").write_text(yaml.safe_dump(head | {"spec": whole}))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "grpo_cli", "run", str(folder / "job.yaml"), "--output", str(folder / "run")]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    (file,) = (folder / "run").glob("*/data/*/*/*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def become_only_rank() -> None:
    """Give this process the environment of a job on CUDA, as the only rank of its world."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place | {"MASTER_PORT": str(free_ports(1)[0])})
    environment.prepare(Device.CUDA, os.environ)
