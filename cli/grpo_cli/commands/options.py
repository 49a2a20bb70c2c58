"""Options of several commands: kubectl's, a job's name that the shell completes, the size of a GPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from grpo_cli.errors import EXIT_CODES, CliError
from grpo_spec.gpus import MEMORY, gpu_bytes

P = ParamSpec("P")
R = TypeVar("R")

GPUS = ", ".join(MEMORY)
_OPTIONS = (
    click.option("--kubeconfig", type=click.Path(), help="Kubeconfig file; default: KUBECONFIG, else ~/.kube/config."),
    click.option("--context", help="Context of the kubeconfig; default: its current one."),
    click.option("-n", "--namespace", help="Namespace; default: the context's."),
)


def kubectl_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options that choose a cluster and a namespace."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def on_cluster(command: Callable[..., R]) -> Callable[..., R]:
    """Add kubectl's options to a command, which gets a `Kube` as its first argument; its failures end in one line."""

    @functools.wraps(command)
    def connected(*args: Any, kubeconfig: str | None, context: str | None, namespace: str | None, **kwargs: Any) -> R:
        from grpo_cli.cluster.api_errors import explained
        from grpo_cli.cluster.kube import connect

        with explained():
            return command(connect(kubeconfig, context, namespace), *args, **kwargs)

    connected.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{EXIT_CODES}"
    return kubectl_options(connected)


def _complete_jobs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from grpo_cli.cluster.api_errors import explained
    from grpo_cli.cluster.kube import connect

    given = {name: ctx.params.get(name) for name in ("kubeconfig", "context", "namespace")}
    try:
        with explained():
            jobs = connect(**given).jobs()
    except CliError:  # pressing Tab should show no error
        return []
    return [
        CompletionItem(job["metadata"]["name"], help=job.get("status", {}).get("phase"))
        for job in jobs
        if job["metadata"]["name"].startswith(incomplete)
    ]


job_argument = click.argument("job", shell_complete=_complete_jobs)


def gpu_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes of an option's GPU, given by its name or by its memory."""
    if value is None:
        return None
    with suppress(ValueError, KeyError):
        if (size := gpu_bytes(value)) >= 2**30:  # 80 is meant as 80Gi
            return size
    raise click.BadParameter(f"{value} is neither one of {GPUS}, nor a size such as 80Gi")
