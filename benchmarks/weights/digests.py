"""Measure how much longer digests make a push to a vLLM inside this process, with a random model of SIZE billions.

Appends one JSON line to OUTPUT: seconds of each push with and without digests, in turn, their medians, and the share
that digests add. The first two pushes, which learn and compile, are `first`.

    python -m benchmarks.weights.digests --size 1.5 --device cuda --output benchmarks/results/digests_h100.jsonl
    OMP_NUM_THREADS=1 python -m benchmarks.weights.digests --size 0.1 --device cpu --output digests_cpu.jsonl
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import click

from benchmarks.common.runs import append, set_alone, versions
from grpo_spec.contract import Device
from grpo_workload.ranks import environment

REPEATS = 3


class NoWrites:
    """Stands in for `Writes`, and looks at nothing."""

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None: ...

    def load(self, load_weights: Callable[[Any], Any], weights: Iterable[Any]) -> Any:
        return load_weights(weights)

    def check_arrived(self) -> None: ...

    def check_kept(self) -> None: ...


@click.command()
@click.option("--size", required=True, help="billions of parameters, as in benchmarks/common/models.py")
@click.option("--device", type=click.Choice([one.value for one in Device]), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(size: str, device: str, output: Path) -> None:
    set_alone()
    environment.prepare(Device(device), os.environ)
    import torch

    from benchmarks.common.models import make_model

    with tempfile.TemporaryDirectory() as folder:
        seconds, num_bytes = pushes(make_model(Path(folder) / "model", size, device), Device(device))
    medians = {name: statistics.median(values) for name, values in seconds.items() if name != "first"}
    line = {
        "size": size,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "bytes": num_bytes,
        **seconds,
        "medians": medians,
    }
    line |= {
        "share": round(medians["with"] / medians["without"] - 1, 3),
        "versions": versions("torch", "vllm", "transformers"),
    }
    append(output, line)
    click.echo(json.dumps(line))


def pushes(model: Path, device: Device) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of the pushes, by what they were made with, and the bytes of one."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_workload.generation import audit, own_engine
    from grpo_workload.weights.export import Export, full

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device.value)
    weights = Export(full(policy), is_partitioned=False)
    generator = engine(model, device, "bfloat16")
    seconds: dict[str, list[float]] = {"first": [], "with": [], "without": []}

    def push(name: str, version: int) -> None:
        if device == Device.CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        generator.sync_weights(weights, version)
        if device == Device.CUDA:
            torch.cuda.synchronize()
        seconds[name].append(round(time.perf_counter() - start, 4))

    for version in range(2):
        push("first", version)
    for version in range(2, 2 + REPEATS):
        push("with", version)
        with without_digests(audit, own_engine):
            push("without", version)
    generator.close()
    return seconds, sum(spec.num_bytes for spec in weights.specs)


def engine(model: Path, device: Device, dtype: str) -> Any:
    """Return a generator whose vLLM has `model`."""
    from grpo_spec.trainer import TrainerConfig
    from grpo_workload.generation.colocate import ColocateGenerator

    config = TrainerConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "dataset": {"path": "unused"},
            "rewards": [{"name": "unused", "stopped": {}}],
            "training": {"maxCompletionLength": 8},
            "generation": {
                "maxModelLen": 128,
                "kvCacheMemory": "64Mi",
                "gpuMemoryUtilization": 0.4,
                "engineArgs": {"enforce_eager": True},
            },
        }
    )
    return ColocateGenerator(config, device)


def without_digests(audit: Any, own_engine: Any) -> ExitStack:
    """Return what leaves them out."""

    def plain(weights: Iterable[Any], _device: str) -> Iterator[Any]:
        return iter(weights)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(audit, "Writes", NoWrites))
    stack.enter_context(mock.patch.object(own_engine, "with_sums", plain))
    return stack


if __name__ == "__main__":
    main()
