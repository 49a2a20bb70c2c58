"""`grpo ui`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import webbrowser
from pathlib import Path

import click

from grpo_cli.errors import CliError, Exit
from grpo_cli.kube import connect
from grpo_cli.ui.cluster import ClusterSource
from grpo_cli.ui.folder import FolderSource, run_folder
from grpo_cli.ui.server import serving
from grpo_cli.ui.source import Source, SourceError


@click.command()
@click.argument("job", required=False)
@click.option("--folder", type=click.Path(path_type=Path), help="A run's folder, or one above it: the newest run below is shown.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on loopback; any that is free when not given.")
@click.option("--no-browser", is_flag=True, help="Print the address, and open nothing.")
@click.option("--kubeconfig", type=click.Path(), help="Kubeconfig file; KUBECONFIG or ~/.kube/config when not given.")
@click.option("--context", help="Context of the kubeconfig; its current one when not given.")
@click.option("-n", "--namespace", help="Namespace; the context's when not given.")
def ui(
    job: str | None,
    folder: Path | None,
    port: int,
    no_browser: bool,
    kubeconfig: str | None,
    context: str | None,
    namespace: str | None,
) -> None:
    """Show JOB, or the run in --folder, on a local page: curves, completions, ranks and pods, what failed.

    The page reads and changes nothing. It is on loopback alone; everybody on this machine can open it while the command runs.
    """
    if (job is None) == (folder is None):
        raise click.UsageError("a JOB or a --folder is needed, and not both")
    source: Source
    try:
        if folder is not None:
            source = FolderSource(run_folder(folder))
        else:
            assert job is not None
            source = ClusterSource(connect(kubeconfig, context, namespace), job)
    except SourceError as error:
        raise CliError(str(error), Exit.NOT_FOUND) from error
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(source, port, open_browser=not no_browser))


async def _serve(source: Source, port: int, *, open_browser: bool) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    try:
        async with serving(source, port) as address:
            click.echo(f"{source.shown.title} is at {address}   (Ctrl-C ends it)")
            if open_browser and not await asyncio.to_thread(webbrowser.open, address):
                click.echo("no browser could be opened: open the address yourself", err=True)
            await ended.wait()
    except OSError as error:
        raise CliError(f"--port {port} cannot be used: {error.strerror or error}", Exit.INVALID) from error
