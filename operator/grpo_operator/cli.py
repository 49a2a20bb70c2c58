"""`grpo`: what a person runs on a job's manifest, without a cluster."""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path

import click
import yaml

from grpo_operator import local, names
from grpo_operator.api import parse_spec
from grpo_operator.builders import manifests
from grpo_operator.render import table
from grpo_operator.topology import Job, make_contract, plan_topology
from grpo_workload.launch_config import accelerate_config, deepspeed_config
from grpo_workload.progress import read_progress


def load_job(path: Path, namespace: str) -> Job:
    """The GRPOJob of a manifest file. Raises ClickException naming the field, or the documents that were found instead."""
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    found = [document for document in documents if document.get("kind") == names.KIND]
    if len(found) != 1:
        kinds = ", ".join(str(document.get("kind")) for document in documents) or "nothing"
        raise click.ClickException(f"{path}: one {names.KIND} is needed, found: {kinds}")
    metadata = found[0].get("metadata", {})
    try:
        spec = parse_spec(found[0].get("spec", {}))
    except ValueError as error:
        raise click.ClickException(f"{path}: {error}") from error
    return Job(
        namespace=metadata.get("namespace", namespace),
        name=metadata.get("name", "job"),
        uid=str(uuid.uuid4()),
        generation=1,
        spec=spec,
    )


@click.group()
def main() -> None:
    """GRPO on a manifest: check it, see what it becomes, run it here."""


@main.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--namespace", default="default", show_default=True, help="Namespace when the manifest names none.")
@click.option(
    "--show", type=click.Choice(["all", "ranks", "configs", "manifests"]), default="all", show_default=True, help="What to print."
)
def render(manifest: Path, namespace: str, show: str) -> None:
    """Print what the job becomes: every rank and engine, DeepSpeed's and accelerate's configuration, the objects of the cluster.

    All but the objects is printed as comments, so that the output stays YAML.
    """
    job = load_job(manifest, namespace)
    topology = plan_topology(job)
    contract = make_contract(job, topology, 0)
    if show in ("all", "ranks"):
        _comment(f"{len(topology.pods)} pods, {topology.world_size} ranks, {len(topology.engines)} vLLM servers", table(contract))
    if show in ("all", "configs"):
        _comment("deepspeed.json, on every pod", json.dumps(deepspeed_config(contract.config), indent=2))
        accelerate = accelerate_config(contract, contract.master)
        _comment("accelerate.yaml, on the first pod (machine_rank counts up)", yaml.safe_dump(accelerate, sort_keys=False))
    if show in ("all", "manifests"):
        print(yaml.safe_dump_all(manifests(job, topology, 0), sort_keys=False), end="")


def _comment(title: str, text: str) -> None:
    print(f"# {title}", *(f"#   {line}" for line in text.rstrip().splitlines()), "#", sep="\n")


@main.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), default=Path("grpo-run"), show_default=True, help="Folder for the run."
)
@click.option("--namespace", default="default", show_default=True, help="Namespace when the manifest names none.")
def run(manifest: Path, output: Path, namespace: str) -> None:
    """Run the job's pods as processes of this machine: same topology, same contract."""
    job = load_job(manifest, namespace)
    topology = plan_topology(job)
    output = (output / time.strftime("%Y%m%d-%H%M%S")).resolve()
    print(f"{len(topology.members)} pods, {topology.world_size} ranks; logs below {output / 'pods'}", flush=True)
    shown: list[tuple[str, int]] = []

    def tell(state: Path) -> None:
        progress = read_progress(state)
        if progress is None or shown[-1:] == [(progress.phase, progress.step)]:
            return
        shown.append((progress.phase, progress.step))
        reward = "" if progress.reward is None else f"  reward {progress.reward:.3f}"
        print(f"{progress.phase:<12} step {progress.step}/{progress.total_steps}{reward}", flush=True)

    result = local.run(job, topology, output, tell)
    for pod, outcome in result.outcomes.items():
        print(f"{pod}: {outcome.reason}: {outcome.message}")
    print(f"run folder: {result.run_folder}")
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main()
