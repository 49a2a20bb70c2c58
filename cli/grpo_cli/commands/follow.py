"""Show a job until it has ended: in a terminal a screen that is redrawn, elsewhere one line per change."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import urllib3
from kubernetes.client.exceptions import ApiException
from rich.console import Console
from rich.live import Live

from grpo_cli.cluster.api_errors import explain
from grpo_cli.cluster.job_reader import JobReader
from grpo_cli.cluster.kube import Object
from grpo_cli.errors import CliError, Exit
from grpo_cli.screen.terminal import line, screen
from grpo_cli.screen.view import JobView

INTERVAL_SECONDS = 2.0
PATIENCE_SECONDS = 120
"""Stop waiting when the API server has been unreachable for this long; an upgrade takes less."""


def follow(reader: JobReader, out: Console, *, timeout: float | None, refused_is_end: bool) -> None:
    """Show a job until it has ended. Raises CliError when it fails or is deleted, and after `timeout` seconds.

    With `refused_is_end`, waiting also ends when the operator refuses the spec.
    """
    views = _until_end(_views(reader, timeout), refused_is_end=refused_is_end)
    if out.is_terminal:
        with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
            for view in views:
                live.update(screen(view), refresh=True)
    else:
        shown = ""
        for view in views:
            if line(view) != shown:
                shown = line(view)
                out.print(f"{time.strftime('%H:%M:%S')}  {view.name}  {shown}", markup=False)


def _until_end(views: Iterator[JobView], *, refused_is_end: bool) -> Iterator[JobView]:
    for view in views:
        yield view
        if view.ended and view.phase != "Succeeded":
            raise CliError(f"job {view.name} is Failed: {view.why}; see `grpo status {view.name}`", Exit.FAILED)
        if view.ended:
            return
        if refused_is_end and view.phase == "Invalid":
            raise CliError(f"the operator refuses job {view.name}: {view.why}; to do: {view.cure}", Exit.INVALID)


def _views(reader: JobReader, timeout: float | None) -> Iterator[JobView]:
    deadline = None if timeout is None else time.monotonic() + timeout
    uid, away_since, view = None, None, None
    while True:
        try:
            job, _, view = reader.read()
            away_since = None
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            explained = explain(error)
            away_since = away_since or time.monotonic()
            if not _may_pass(error) or view is None or time.monotonic() - away_since > PATIENCE_SECONDS:
                raise explained from error
            click.echo(f"{explained.message}; trying again", err=True)
        else:
            uid = _same(job, uid)
            yield view
        if deadline is not None and time.monotonic() > deadline:
            where = f" in phase {view.phase}: {view.why}" if view else ""
            raise CliError(f"--timeout {timeout:.0f} s has passed; the job continues{where}", Exit.DEADLINE)
        time.sleep(INTERVAL_SECONDS)


def _may_pass(error: Exception) -> bool:
    return not isinstance(error, ApiException) or not error.status or error.status == 429 or error.status >= 500


def _same(job: Object, uid: str | None) -> str:
    found = str(job["metadata"]["uid"])
    if uid not in (None, found):
        raise CliError(
            f"job {job['metadata']['name']} was deleted and created again; follow the new one with `grpo watch`",
            Exit.NOT_FOUND,
        )
    return found
