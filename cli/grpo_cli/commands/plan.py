"""`grpo plan`. A process with torch counts the bytes; here are the question, and the answer as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from grpo_cli.commands.check_model import ask, check_packages, with_model
from grpo_cli.errors import Exit
from grpo_spec.gpus import MEMORY, gpu_bytes

PROGRAM = "grpo_workload.plan"
GIB = 2**30
LEAST = GIB // 100  # bytes of the smallest part that has a row
NAMES = ", ".join(MEMORY)


def _bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else gpu_bytes(value)
    except (ValueError, KeyError):
        raise click.BadParameter(f"{value} is neither one of {NAMES}, nor a size such as 80Gi") from None


@click.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--gpu", callback=_bytes, metavar="NAME|SIZE", help=f"GPU of the pods: {NAMES}, or its memory, such as 80Gi."
)
@click.option("--engine-gpu", callback=_bytes, metavar="NAME|SIZE", help="GPU of engine pods, where it is another one.")
@click.option("--model", help="Name on the hub, or folder, in place of the job's model; config.json is enough.")
def plan(manifest: Path, gpu: int | None, engine_gpu: int | None, model: str | None) -> None:
    """Say whether the job fits on its GPUs.

    If it does not, up to three edits with which it would are named. A table for the tightest GPU of each group, and for
    the host memory of its pod, has the GiB of each part in each phase. Only the model's configuration is read, no
    weights. Without --gpu, the pods' node selectors must name the GPUs (nvidia.com/gpu.product or
    nvidia.com/gpu.memory).

    \b
    Exit codes:
      0  it fits
      1  it does not; the lines say by how much, and up to three edits with which it would
      2  the command line or the manifest is wrong, or a package is missing
    """  # noqa: D301 - click's own mark
    from dataclasses import replace

    from grpo_cli.documents.manifest import load_job
    from grpo_cli.local.edited import contract_of, edits, pod_sizes
    from grpo_operator.api.spec import parse_spec
    from grpo_spec.schema import dump

    check_packages("plan")
    loaded = load_job(manifest)
    job, spec = loaded.job("default"), loaded.document["spec"]
    if model is not None:
        spec = with_model(spec, model)
        job = replace(job, spec=parse_spec(spec))
    limits, selected = pod_sizes(job)
    contract = contract_of(job)
    trainers = [selected.get(member.group) for member in contract.members]
    gpu = gpu or (None if None in trainers else min(size for size in trainers if size is not None))
    if gpu is None:
        raise click.UsageError(f"give --gpu: {NAMES}, or a size such as 80Gi; the pods' node selectors name none")
    engines = [selected.get(engine.group) or gpu for engine in contract.engines]
    found = ask(
        PROGRAM,
        {
            "contract": dump(contract),
            "gpuBytes": gpu,
            "engineBytes": engine_gpu or min(engines, default=gpu),
            "hostBytes": limits,
            "edits": [[edit, dump(made)] for edit, made in edits(job, spec)],
        },
    )
    print(*report(found), sep="\n")
    sys.exit(Exit.OK if found["fits"] else Exit.FAILED)


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an answer."""
    for place in found["places"]:
        if any(total(parts) for parts in place["phases"].values()):
            yield from (*table(place), "")
    largest = f"{found['tokens']} tokens"
    if found["chosenTokens"] > found["tokens"]:
        largest = f"{found['tokens']} tokens (one longest sequence); up to about {found['chosenTokens']} fit"
    yield f"micro-batch  {largest}"
    if found["unknown"]:
        yield f"activations are left out: the model does not run on the meta device ({found['unknown']})"
    if found["ratio"]:
        yield f"above 20B    {found['ratio']}"
    if found["isSafe"]:
        yield "fits"
        return
    yield f"does not fit: {found['why']}" if found["why"] else "fits, but tightly: fragments may take what is left"
    if not found["proposals"]:
        yield "no single edit would make it fit"
        return
    yield "one of these edits makes it fit, the fastest first (an order from a simple model, not a forecast):"
    for one in found["proposals"]:
        peak = max(total(parts) for place in one["places"] if not place["isHost"] for parts in place["phases"].values())
        yield f"  {one['field']}: {json.dumps(one['value'])}  ({peak / GIB:.1f} GiB at most)"


def table(place: Mapping[str, Any]) -> Iterator[str]:
    """Yield a place's table: parts by phase, in GiB."""
    phases = place["phases"]
    names = [name for parts in phases.values() for name, size in parts.items() if size >= LEAST]
    limit = "" if place["limit"] is None else f", of {place['limit'] / GIB:.1f} GiB"
    head = f"{place['name']}{' host memory' if place['isHost'] else ''}{limit}"
    width = max(len(head), *map(len, names), 20)
    yield f"{head:{width}}" + "".join(f"  {phase:>{max(8, len(phase))}}" for phase in phases)
    rows = {name: {phase: parts.get(name, 0) for phase, parts in phases.items()} for name in dict.fromkeys(names)}
    for name, row in (rows | {"total": {phase: total(parts) for phase, parts in phases.items()}}).items():
        cells = (f"{size / GIB:.2f}" if size >= LEAST else "" for size in row.values())
        yield f"{name:{width}}" + "".join(
            f"  {cell:>{max(8, len(phase))}}" for cell, phase in zip(cells, phases, strict=True)
        )


def total(parts: Mapping[str, int]) -> int:
    """Bytes of all parts."""
    return sum(parts.values())
