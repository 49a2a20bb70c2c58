"""`grpo plan`: whether a job fits, as tables."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from grpo_cli.commands.check_model import with_model
from grpo_cli.commands.options import GPUS, gpu_size
from grpo_cli.errors import Exit
from grpo_cli.screen.memory_plan import report


@click.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--gpu", callback=gpu_size, metavar="NAME|SIZE", help=f"GPU of the pods: {GPUS}, or its memory, such as 80Gi."
)
@click.option(
    "--engine-gpu", callback=gpu_size, metavar="NAME|SIZE", help="GPU of engine pods, where it is another one."
)
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
    from grpo_cli.local.planning import answer, question
    from grpo_operator.api.spec import parse_spec
    from grpo_spec.schema import dump

    job = load_job(manifest).job("default")
    if model is not None:
        job = replace(job, spec=parse_spec(with_model(dump(job.spec), model)))
    asked = question(job, gpu, engine_gpu)
    if asked is None:
        raise click.UsageError(f"give --gpu: {GPUS}, or a size such as 80Gi; the pods' node selectors name none")
    found = answer(asked)
    print(*report(found), sep="\n")
    sys.exit(Exit.OK if found["fits"] else Exit.FAILED)
