"""Commands on jobs in a cluster: submit, list, status, watch, suspend, resume."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from grpo_cli.asking import Asker
from grpo_cli.errors import CliError, Exit
from grpo_cli.follow import follow
from grpo_cli.kube import Kube
from grpo_cli.manifest import load_manifest
from grpo_cli.options import job_argument, on_cluster
from grpo_cli.screen import console, job_table, screen, show

timeout_option = click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Give up waiting after so long.")


@click.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--wait", is_flag=True, help="Show progress until the job has ended, and exit as it did.")
@timeout_option
@click.option("--force-conflicts", is_flag=True, help="Take over fields that were set by others, such as kubectl.")
@on_cluster
def submit(kube: Kube, manifest: Path, wait: bool, timeout: float | None, force_conflicts: bool) -> None:
    """Create the GRPOJob of MANIFEST, or change it, by server-side apply.

    It is checked here first, so that mistakes are told without a cluster.
    """
    job = load_manifest(manifest)
    own = job["metadata"].setdefault("namespace", kube.namespace)
    if kube.is_asked_for and own != kube.namespace:
        raise CliError(f"{manifest} says namespace {own}, and --namespace {kube.namespace}: leave one out", Exit.INVALID)
    kube.namespace = own
    is_new, name = kube.apply_job(job, force=force_conflicts), job["metadata"]["name"]
    click.echo(f"job {kube.namespace}/{name} {'created' if is_new else 'applied'}", err=True)
    if wait:
        follow(Asker(kube, name), console(), timeout=timeout, refused_is_end=True)


@click.command("list")
@click.option("-A", "--all-namespaces", is_flag=True, help="Jobs of all namespaces.")
@on_cluster
def list_jobs(kube: Kube, all_namespaces: bool) -> None:
    """List jobs, the oldest first."""
    jobs = kube.jobs(everywhere=all_namespaces)
    if not jobs:
        where = "in any namespace" if all_namespaces else f"in namespace {kube.namespace}"
        click.echo(f"no jobs {where}", err=True)
        return
    show(console(), job_table(jobs, datetime.now(UTC), namespaces=all_namespaces))


@click.command()
@job_argument
@on_cluster
def status(kube: Kube, job: str) -> None:
    """Show JOB on one screen: its phase and why, pods and ranks that are missing, progress, the last failure, the newest events."""
    *_, view = Asker(kube, job).look()
    show(console(), screen(view))


@click.command()
@job_argument
@timeout_option
@on_cluster
def watch(kube: Kube, job: str, timeout: float | None) -> None:
    """Show the status of JOB until it has ended, and exit as it did; a line for each change when the output is no terminal."""
    follow(Asker(kube, job), console(), timeout=timeout, refused_is_end=False)


@click.command()
@job_argument
@on_cluster
def suspend(kube: Kube, job: str) -> None:
    """Let JOB save a checkpoint, end its pods and give its GPUs back. `grpo resume` goes on from there."""
    _set_suspend(kube, job, True)


@click.command()
@job_argument
@on_cluster
def resume(kube: Kube, job: str) -> None:
    """Let a suspended JOB go on."""
    _set_suspend(kube, job, False)


def _set_suspend(kube: Kube, name: str, wanted: bool) -> None:
    job: dict[str, Any] = kube.job(name)
    phase = job.get("status", {}).get("phase")
    if phase in ("Succeeded", "Failed"):
        raise CliError(f"job {name} has ended ({phase}); submit it under a new name to run it again", Exit.INVALID)
    if bool(job["spec"].get("suspend")) == wanted:
        click.echo(f"job {name} is {'suspended' if wanted else 'not suspended'} already", err=True)
        return
    kube.suspend_job(name, wanted)
    click.echo(f"job {name}: {'its ranks save and end' if wanted else 'goes on'}; follow it with `grpo watch {name}`", err=True)
