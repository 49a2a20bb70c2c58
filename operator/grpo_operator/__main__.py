"""`python -m grpo_operator run`: the operator."""

from __future__ import annotations

import asyncio
import logging

import click
import kopf

from grpo_operator.check import check as check_installation
from grpo_operator.handlers import Options, registry, settings


@click.group()
def main() -> None:
    """Reconcile GRPOJobs."""


@main.command()
@click.option("--namespace", "namespaces", multiple=True, help="Namespace to watch; may be repeated. All of them when not given.")
@click.option("--liveness-port", type=int, default=8080, show_default=True, help="Port of /healthz.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Port of /metrics. Not served when not given.")
@click.option("--no-progress", is_flag=True, help="Do not ask launchers for progress: for clusters whose pods are not real.")
@click.option("--no-nodes", is_flag=True, help="Do not read nodes: for roles without them. Lost pods are then given up later.")
@click.option("--no-network-policies", is_flag=True, help="Give jobs no NetworkPolicy, and take it from those that have one.")
@click.option("--log-format", type=click.Choice(["plain", "full", "json"]), default="full", show_default=True, help="Form of the log.")
def run(
    namespaces: tuple[str, ...],
    liveness_port: int,
    metrics_port: int | None,
    no_progress: bool,
    no_nodes: bool,
    no_network_policies: bool,
    log_format: str,
) -> None:
    """Watch GRPOJobs and reconcile them until told to end."""
    kopf.configure(log_format=kopf.LogFormat[log_format.upper()])
    for chatty in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):  # a line for every event of every pod, and every probe
        logging.getLogger(chatty).setLevel(logging.WARNING)
    options = Options(
        ask_progress=not no_progress, read_nodes=not no_nodes, network_policies=not no_network_policies, metrics_port=metrics_port
    )
    asyncio.run(
        kopf.operator(
            registry=registry(options),
            settings=settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            liveness_endpoint=f"http://0.0.0.0:{liveness_port}/healthz",
        )
    )


@main.command()
@click.option("--namespace", required=True, help="Where the operator runs.")
@click.option("--selector", required=True, help="Labels of its pod.")
@click.option("--port", type=int, default=8080, show_default=True, help="Port of its /healthz.")
@click.option("--timeout", type=float, default=30, show_default=True, help="Seconds until what is wrong is told.")
def check(namespace: str, selector: str, port: int, timeout: float) -> None:
    """Look whether the CRD is served, with all fields of this release, and whether the operator answers."""
    wrong = asyncio.run(check_installation(namespace, selector, port, timeout))
    if wrong:
        raise click.ClickException("\n".join(wrong))
    click.echo("the API server knows every field of this release, and the operator answers")


if __name__ == "__main__":
    main()
