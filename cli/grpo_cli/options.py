"""What all commands that talk to a cluster have in common: kubectl's options, and a job's name that the shell completes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import click
import urllib3
from click.shell_completion import CompletionItem
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from grpo_cli.errors import EXIT_CODES
from grpo_cli.kube import connect

P = ParamSpec("P")
R = TypeVar("R")

_OPTIONS = (
    click.option("--kubeconfig", type=click.Path(), help="Kubeconfig file; KUBECONFIG or ~/.kube/config when not given."),
    click.option("--context", help="Context of the kubeconfig; its current one when not given."),
    click.option("-n", "--namespace", help="Namespace; the context's when not given."),
)


def on_cluster(command: Callable[..., R]) -> Callable[..., R]:
    """Add kubectl's options to a command, which gets a `Kube` as its first argument."""

    @functools.wraps(command)
    def connected(*args: Any, kubeconfig: str | None, context: str | None, namespace: str | None, **kwargs: Any) -> R:
        return command(connect(kubeconfig, context, namespace), *args, **kwargs)

    for option in reversed(_OPTIONS):
        connected = option(connected)
    connected.__doc__ = f"{command.__doc__}\n\n{EXIT_CODES}"
    return connected


def _complete_jobs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    given = {name: ctx.params.get(name) for name in ("kubeconfig", "context", "namespace")}
    try:
        jobs = connect(**given).jobs()
    except (ApiException, ConfigException, click.ClickException, urllib3.exceptions.HTTPError):  # nobody wants an error on a tab
        return []
    return [
        CompletionItem(job["metadata"]["name"], help=job.get("status", {}).get("phase"))
        for job in jobs
        if job["metadata"]["name"].startswith(incomplete)
    ]


job_argument = click.argument("job", shell_complete=_complete_jobs)
