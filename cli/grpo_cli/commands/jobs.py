"""Commands on jobs in a cluster. They import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from grpo_cli.commands.options import job_argument, on_cluster
from grpo_cli.errors import CliError, Exit

if TYPE_CHECKING:
    from grpo_cli.cluster.kube import Kube

timeout_option = click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Stop waiting after this time."
)


@click.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--wait", is_flag=True, help="Show progress until the job has ended; the exit code is then the job's.")
@timeout_option
@click.option("--force-conflicts", is_flag=True, help="Take over fields that others have set, such as kubectl.")
@on_cluster
def submit(kube: Kube, manifest: Path, wait: bool, timeout: float | None, force_conflicts: bool) -> None:
    """Create or change the GRPOJobs and other objects of MANIFEST.

    Jobs are checked here first, then all documents are sent in their order by server-side apply.
    """
    from grpo_cli.cluster import submission
    from grpo_cli.documents.manifest import load_jobs, only_job

    documents = load_jobs(manifest)
    followed = only_job(documents, f"{manifest} with --wait") if wait else None
    for what, is_new in submission.submit(kube, documents, str(manifest), force=force_conflicts):
        click.echo(f"{what} {'created' if is_new else 'applied'}", err=True)
    if followed:
        kube.namespace = followed.document["metadata"].get("namespace") or kube.namespace
        _follow(kube, followed.name, timeout, refused_is_end=True)


@click.command("list")
@click.option("-A", "--all-namespaces", is_flag=True, help="List the jobs of all namespaces.")
@on_cluster
def list_jobs(kube: Kube, all_namespaces: bool) -> None:
    """List jobs, oldest first."""
    from datetime import UTC, datetime

    from grpo_cli.screen.terminal import console, job_table, show

    jobs = kube.jobs(everywhere=all_namespaces)
    if not jobs:
        where = "in any namespace" if all_namespaces else f"in namespace {kube.namespace}"
        click.echo(f"no jobs {where}", err=True)
        return
    show(console(), job_table(jobs, datetime.now(UTC), namespaces=all_namespaces))


@click.command()
@job_argument
@click.option("--completions", is_flag=True, help="Also show some completions of the newest step, turn by turn.")
@on_cluster
def status(kube: Kube, job: str, completions: bool) -> None:
    """Show JOB on one screen.

    It has the phase and its cause, missing pods and ranks, progress, the last failure, and the newest events.
    """
    from grpo_cli.cluster.job_reader import JobReader
    from grpo_cli.screen.terminal import console, screen, show
    from grpo_cli.screen.transcript import transcript

    reader, out = JobReader(kube, job), console()
    found, pods, view = reader.read()
    show(out, screen(view))
    if completions:
        for row in reader.completions(found, pods):
            show(out, transcript(row))


@click.command()
@job_argument
@timeout_option
@on_cluster
def watch(kube: Kube, job: str, timeout: float | None) -> None:
    """Show the status of JOB until it has ended.

    The exit code is the job's. When the output is not a terminal, each change is one line.
    """
    _follow(kube, job, timeout, refused_is_end=False)


def _follow(kube: Kube, job: str, timeout: float | None, *, refused_is_end: bool) -> None:
    from grpo_cli.cluster.job_reader import JobReader
    from grpo_cli.commands.follow import follow
    from grpo_cli.screen.terminal import console

    follow(JobReader(kube, job), console(), timeout=timeout, refused_is_end=refused_is_end)


@click.command()
@job_argument
@click.option("--rank", type=click.IntRange(min=0), help="Only lines of this global rank.")
@click.option("--role", type=click.Choice(["trainer", "engine", "environment"]), help="Only pods of this role.")
@click.option("-f", "--follow", is_flag=True, help="Continue until the job has ended, through restarts.")
@click.option("--tail", type=click.IntRange(min=0), metavar="LINES", help="Begin with this many last lines per pod.")
@click.option("-p", "--previous", is_flag=True, help="Only containers that have ended, of pods that hold their result.")
@on_cluster
def logs(
    kube: Kube, job: str, rank: int | None, role: str | None, follow: bool, tail: int | None, previous: bool
) -> None:
    """Print the logs of all pods of JOB, in order of time.

    Each line begins with the name of its pod.
    """
    from grpo_cli.commands.logs import follow_logs, print_logs

    if follow and previous:
        raise click.UsageError("--follow and --previous exclude each other: leave one out")
    if follow:
        follow_logs(kube, job, rank=rank, role=role, tail=tail)
    else:
        print_logs(kube, job, rank=rank, role=role, tail=tail, previous=previous)


@click.command()
@job_argument
@on_cluster
def suspend(kube: Kube, job: str) -> None:
    """Suspend JOB: save a checkpoint and give its GPUs back.

    `grpo resume` continues from that checkpoint.
    """
    _set_suspend(kube, job, True)


@click.command()
@job_argument
@on_cluster
def resume(kube: Kube, job: str) -> None:
    """Resume a suspended JOB."""
    _set_suspend(kube, job, False)


def _set_suspend(kube: Kube, name: str, wanted: bool) -> None:
    job = kube.job(name)
    phase = job.get("status", {}).get("phase")
    if phase in ("Succeeded", "Failed"):
        raise CliError(f"job {name} has ended ({phase}); submit it under a new name to run it again", Exit.INVALID)
    if bool(job["spec"].get("suspend")) == wanted:
        click.echo(f"job {name} is {'already' if wanted else 'not'} suspended: nothing to do", err=True)
        return
    kube.suspend_job(name, wanted)
    done = "its ranks save a checkpoint and end" if wanted else "it continues"
    click.echo(f"job {name}: {done}; follow it with `grpo watch {name}`", err=True)


@click.command()
@job_argument
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Archive to write; default: grpo-diagnose-JOB-TIME.tar.gz.",
)
@on_cluster
def diagnose(kube: Kube, job: str, output: Path | None) -> None:
    """Collect what a bug report about JOB needs.

    The archive has the job's objects, events, versions, and the logs of its pods and of the operator. Values of
    environment variables and everything that looks like a secret are removed. Read the archive before you send it:
    logs contain what your own code prints.
    """
    from grpo_cli.commands.diagnose import write_archive

    write_archive(kube, job, output)
