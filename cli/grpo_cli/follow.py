"""Looking at a job until it has ended: a screen that is drawn again in a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import urllib3
from kubernetes.client.exceptions import ApiException
from rich.console import Console
from rich.live import Live

from grpo_cli.asking import Asker
from grpo_cli.errors import CliError, Exit, explain
from grpo_cli.kube import Object
from grpo_cli.screen import line, screen
from grpo_cli.view import JobView

INTERVAL_SECONDS = 2.0
PATIENCE_SECONDS = 120
"""How long an API server may be away, as in an upgrade, before that is the end of waiting."""


def follow(asker: Asker, out: Console, *, timeout: float | None, refused_is_end: bool) -> None:
    """Show a job until it has ended. Raises CliError when it ends badly, when it is deleted, and when `timeout` seconds are over.

    With `refused_is_end`, a spec that the operator refuses is an end too.
    """
    looks = _until_end(_looks(asker, timeout), refused_is_end=refused_is_end)
    if out.is_terminal:
        with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
            for view in looks:
                live.update(screen(view), refresh=True)
    else:
        shown = ""
        for view in looks:
            if line(view) != shown:
                shown = line(view)
                out.print(f"{time.strftime('%H:%M:%S')}  {view.name}  {shown}", markup=False)


def _until_end(looks: Iterator[JobView], *, refused_is_end: bool) -> Iterator[JobView]:
    for view in looks:
        yield view
        if view.ended and view.phase != "Succeeded":
            raise CliError(f"job {view.name} is Failed: {view.why}; see `grpo status {view.name}`", Exit.FAILED)
        if view.ended:
            return
        if refused_is_end and view.phase == "Invalid":
            raise CliError(f"the operator refuses job {view.name}: {view.why}; to do: {view.cure}", Exit.INVALID)


def _looks(asker: Asker, timeout: float | None) -> Iterator[JobView]:
    deadline = None if timeout is None else time.monotonic() + timeout
    uid, away_since, view = None, None, None
    while True:
        try:
            job, _, view = asker.look()
            away_since = None
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            told = explain(error)
            away_since = away_since or time.monotonic()
            if not _may_pass(error) or view is None or time.monotonic() - away_since > PATIENCE_SECONDS:
                raise told from error
            click.echo(f"{told.message}; trying again", err=True)
        else:
            uid = _same(job, uid)
            yield view
        if deadline is not None and time.monotonic() > deadline:
            where = f" in phase {view.phase}: {view.why}" if view else ""
            raise CliError(f"--timeout {timeout:.0f} s is over, and the job goes on{where}", Exit.DEADLINE)
        time.sleep(INTERVAL_SECONDS)


def _may_pass(error: Exception) -> bool:
    return not isinstance(error, ApiException) or not error.status or error.status == 429 or error.status >= 500


def _same(job: Object, uid: str | None) -> str:
    found = str(job["metadata"]["uid"])
    if uid not in (None, found):
        raise CliError(f"job {job['metadata']['name']} was deleted and made anew; this one was not waited for", Exit.NOT_FOUND)
    return found
