"""`grpo ui`. It imports what it needs when it runs, so that `--help` and completion are quick."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grpo_cli.commands.options import GPUS, gpu_size, kubectl_options
from grpo_cli.errors import CliError, Exit

if TYPE_CHECKING:
    from grpo_cli.ui.others import Others
    from grpo_cli.ui.source import Source


@click.command()
@click.argument("job", required=False)
@click.option(
    "--folder",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A run's folder, or one above it: the newest run below is shown. Further ones can be compared with it.",
)
@click.option(
    "--gpu",
    callback=gpu_size,
    metavar="NAME|SIZE",
    help=f"GPU for the view Memory: {GPUS}, or its memory, such as 80Gi; default: what JOB's node selectors say.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on loopback; default: any free one.")
@click.option("--no-browser", is_flag=True, help="Print the address and do not open a browser.")
@kubectl_options
def ui(
    job: str | None,
    folders: tuple[Path, ...],
    gpu: int | None,
    port: int,
    no_browser: bool,
    kubeconfig: str | None,
    context: str | None,
    namespace: str | None,
) -> None:
    """Show JOB, or a run's folder, on a local page.

    It has curves, completions, ranks and pods, the plan of a job's memory, and what failed. The page changes nothing.
    It is on loopback only; everybody on this machine can open it while the command runs.
    """
    from grpo_cli.ui.others import further_folders

    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="grpo-ui-") as fetched:
        if job is not None and not folders:
            source = _job_source(job, kubeconfig, context, namespace, Path(fetched) / job)
            others = other_jobs(job, kubeconfig, context, namespace, Path(fetched))
        elif folders and job is None and gpu is None:
            source = _folder_source(folders[0])
            others = further_folders({str(folder): _folder_source(folder) for folder in folders[1:]})
        else:
            raise click.UsageError("give either a JOB, with --gpu or without, or --folder")
        asyncio.run(_serve(source, others, port, gpu, open_browser=not no_browser))


def _job_source(job: str, kubeconfig: str | None, context: str | None, namespace: str | None, folder: Path) -> Source:
    """Return a job as a source. Of one whose pods are gone, the run's files come into `folder`."""
    from grpo_cli.cluster.api_errors import explained
    from grpo_cli.cluster.kube import connect
    from grpo_cli.ui.cluster import ClusterSource
    from grpo_cli.ui.finished import fetch, is_away

    with explained():
        kube = connect(kubeconfig, context, namespace)
        found = kube.job(job)
        away = is_away(kube, found)
    folder.mkdir(exist_ok=True)
    try:
        with explained():
            has_files = away and fetch(kube, found, folder, lambda said: click.echo(said, err=True))
    except click.ClickException as error:
        has_files = False
        click.echo(f"the page is without curves: {error.message}", err=True)
    return ClusterSource(kube, job, folder if has_files else None)


def other_jobs(job: str, kubeconfig: str | None, context: str | None, namespace: str | None, folder: Path) -> Others:
    """Return the namespace's other jobs, each of which becomes a source when it is chosen."""
    from grpo_cli.cluster.api_errors import explained
    from grpo_cli.cluster.kube import connect
    from grpo_cli.ui.others import Others
    from grpo_cli.ui.source import SourceError

    def names() -> list[str]:
        try:
            with explained():
                found = connect(kubeconfig, context, namespace).jobs()
        except click.ClickException as error:
            raise SourceError(error.message) from error
        return sorted(one["metadata"]["name"] for one in found if one["metadata"]["name"] != job)

    def begin(name: str) -> Source:
        try:
            return _job_source(name, kubeconfig, context, namespace, folder / name)
        except click.ClickException as error:
            raise SourceError(error.message) from error

    return Others(names, begin)


def _folder_source(folder: Path) -> Source:
    from grpo_cli.ui.folder import FolderSource, run_folder
    from grpo_cli.ui.source import SourceError

    try:
        return FolderSource(run_folder(folder))
    except SourceError as error:
        raise CliError(str(error), Exit.NOT_FOUND) from error


async def _serve(source: Source, others: Others, port: int, gpu: int | None, *, open_browser: bool) -> None:
    from grpo_cli.ui.server import serving

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    try:
        async with serving(source, port, gpu, others) as address:
            click.echo(f"{source.shown.title} is at {address}   (Ctrl-C ends it)")
            if open_browser and not await asyncio.to_thread(webbrowser.open, address):
                click.echo("no browser could be opened: open the address yourself", err=True)
            await ended.wait()
    except OSError as error:
        raise CliError(f"--port {port} cannot be used: {error.strerror or error}", Exit.INVALID) from error
