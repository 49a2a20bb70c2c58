"""Commands on a job's manifest that need no cluster, but for `render --cluster`. They import what they need when they
run.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from grpo_cli.documents.manifest import JobDocument
    from grpo_operator.layout.job import Job
    from grpo_spec.reports import Progress


@click.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-n", "--namespace", help="Namespace if the manifest names none; default: default, with --cluster the context's."
)
@click.option("--cluster", is_flag=True, help="With what the site sets in the cluster, and where each value is from.")
@click.option("--kubeconfig", type=click.Path(), help="With --cluster. Default: KUBECONFIG, else ~/.kube/config.")
@click.option("--context", help="With --cluster: context of the kubeconfig; default: its current one.")
@click.option(
    "--show",
    type=click.Choice(["all", "ranks", "configs", "manifests"]),
    default="all",
    show_default=True,
    help="What to print.",
)
def render(
    manifest: Path, namespace: str | None, cluster: bool, kubeconfig: str | None, context: str | None, show: str
) -> None:
    """Print what the job becomes.

    That is every rank and engine, the configurations of DeepSpeed and accelerate, and the objects of the cluster. All
    but the objects are comments, so that the output is YAML.
    """
    import yaml

    from grpo_cli.documents.manifest import load_job
    from grpo_cli.documents.yaml_values import write_yaml
    from grpo_cli.screen.rank_table import table
    from grpo_operator.layout.contracts import make_contract
    from grpo_operator.layout.manifests import manifests
    from grpo_operator.layout.topology import plan_topology
    from grpo_spec.deepspeed_config import accelerate_config, deepspeed_config
    from grpo_spec.words import counted

    document = load_job(manifest)
    job = _with_site(document, namespace, kubeconfig, context) if cluster else document.job(namespace or "default")
    topology = plan_topology(job)
    ranks = counted(topology.world_size, "rank")
    contract = make_contract(job, topology, 0)
    if show in ("all", "ranks"):
        _comment(
            ", ".join((counted(len(topology.pods), "pod"), ranks, counted(len(topology.engines), "vLLM server"))),
            table(contract),
        )
    if show in ("all", "configs"):
        _comment("deepspeed.json, on every pod", json.dumps(deepspeed_config(contract.config), indent=2))
        accelerate = accelerate_config(contract, contract.master)
        _comment(
            "accelerate.yaml, on the first pod (machine_rank counts up)", yaml.safe_dump(accelerate, sort_keys=False)
        )
    if show in ("all", "manifests"):
        print(write_yaml(manifests(job, topology, 0)), end="")


def _with_site(document: JobDocument, namespace: str | None, kubeconfig: str | None, context: str | None) -> Job:
    """Return the job with what its site sets, and print where that is from."""
    from grpo_cli.cluster.api_errors import explained
    from grpo_cli.cluster.kube import connect
    from grpo_cli.cluster.site import read_site
    from grpo_cli.screen.origins import origin_lines

    raw = document.document
    with explained():
        kube = connect(kubeconfig, context, raw["metadata"].get("namespace", namespace))
        layers, hidden = read_site(kube)
    lines = origin_lines(raw, layers) or ["nothing"]
    lines += [f"not known: {kind}, which you may not read" for kind in hidden]
    _comment(f"what the site sets for jobs of {kube.namespace}", "\n".join(lines))
    return document.job(kube.namespace, layers)


def _comment(title: str, text: str) -> None:
    print(f"# {title}", *(f"#   {line}" for line in text.rstrip().splitlines()), "#", sep="\n")


@click.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("grpo-run"),
    show_default=True,
    help="Folder for the run.",
)
@click.option("--namespace", default="default", show_default=True, help="Namespace if the manifest names none.")
def run(manifest: Path, output: Path, namespace: str) -> None:
    """Run the job's pods as processes of this machine.

    They have the topology and the contract that they would have in a cluster, and the variables of podTemplate.env
    whose values the manifest has.
    """
    from grpo_cli.documents.manifest import load_job
    from grpo_cli.local import processes
    from grpo_cli.local.variables import variables
    from grpo_operator.layout.topology import plan_topology
    from grpo_spec.words import counted

    job = load_job(manifest).job(namespace)
    topology = plan_topology(job)
    given = variables(job, topology)
    output = (output / time.strftime("%Y%m%d-%H%M%S")).resolve()
    pods, ranks = counted(len(topology.members), "pod"), counted(topology.world_size, "rank")
    print(f"{pods}, {ranks}; logs below {output / 'pods'}", flush=True)
    if given.elsewhere:
        print(
            f"of podTemplate, not set here: {', '.join(given.elsewhere)}: only a cluster has their values", flush=True
        )
    shown: list[tuple[str, int]] = []

    def show_progress(progress: Progress) -> None:
        if shown[-1:] == [(progress.phase, progress.step)]:
            return
        shown.append((progress.phase, progress.step))
        reward = "" if progress.reward is None else f"  reward {progress.reward:.3f}"
        print(f"{progress.phase:<12} step {progress.step}/{progress.total_steps}{reward}", flush=True)

    result = processes.run(job, topology, output, show_progress, partial(print, flush=True), given.by_pod)
    for pod, outcome in result.outcomes.items():
        print(f"{pod}: {outcome.reason}: {outcome.message}")
    print(f"run folder: {result.run_folder}")
    sys.exit(result.exit_code)
