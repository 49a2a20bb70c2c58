"""Subjects of tests on GPUs: a whole job by `grpo run`, or the parts of a rank in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from grpo_spec.contract import Device
from grpo_workload.ranks import environment
from support.paths import PROGRAMS
from support.trainer.only_rank import only_rank
from support.trainer.step_settings import bare_settings

EVEN: dict[str, Any] = {
    "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
    "rewards": [{"name": "even", "function": "token_reward:even_tokens"}],
}
"""Rows and a reward of a job; random weights can earn it."""
SMALL_ENGINE: dict[str, Any] = {"maxModelLen": 256, "kvCacheMemory": "1Gi", "engineArgs": {"enforce_eager": True}}


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


def run_ranks(program: str, ranks: int, *arguments: object, **env: str) -> None:
    """Run a file of programs/ on the first GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(PROGRAMS / program), *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-4000:]


def become_only_rank() -> None:
    """Give this process the environment of a job on CUDA, as the only rank of its world."""
    os.environ.update(only_rank())
    environment.prepare(Device.CUDA, os.environ)


@contextmanager
def only_world() -> Iterator[None]:
    """Let this process be the only rank of a world; it finds the modules of programs/."""
    become_only_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAMS))
        yield
    dist.destroy_process_group()


def colocated_engine(model: Any, **engine_args: Any) -> Any:
    """Make this process the only rank, and return its `ColocateGenerator` of `model`, whose name is its folder."""
    become_only_rank()
    from grpo_workload.generation.colocate import ColocateGenerator  # reads the variables above

    config = bare_settings(
        str(model.name_or_path),
        "bfloat16",
        training={"maxCompletionLength": 16},
        generation={
            "maxModelLen": 128,
            "kvCacheMemory": "2Gi",
            "engineArgs": {"enforce_eager": True, **engine_args},
        },
    )
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    return ColocateGenerator(config, Device.CUDA)
