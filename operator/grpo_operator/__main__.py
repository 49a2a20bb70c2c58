"""The command line of the operator's image: `run` and `check`."""

from __future__ import annotations

import asyncio
import logging
import sys

import click
import kopf

from grpo_operator.edge.check import check as check_installation
from grpo_operator.edge.handlers import Options, registry, settings
from grpo_operator.layout.admission import Allowed

RECURSION_LIMIT = 100_000
"""Python's json module raises for objects that are nested more deeply than this limit, by default 1,000. API servers
accept 10,000 levels, for example in podTemplate.affinity: one job would end the watch of all jobs."""


@click.group()
def main() -> None:
    """Run the operator, or check an installation."""


@main.command()
@click.option(
    "--namespace", "namespaces", multiple=True, help="Namespace to watch; may be repeated. Default: all namespaces."
)
@click.option("--liveness-port", type=int, default=8080, show_default=True, help="Port of /healthz.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Port of /metrics. Default: not served.")
@click.option(
    "--no-progress", is_flag=True, help="Do not ask launchers for progress; for clusters whose pods are not real."
)
@click.option(
    "--no-nodes",
    is_flag=True,
    help="Do not read nodes; for roles without that right. Pods of a lost node are then given up later.",
)
@click.option("--no-network-policies", is_flag=True, help="Give jobs no NetworkPolicy and delete existing ones.")
@click.option("--allow-host-path", is_flag=True, help="Let podTemplate mount folders of nodes (hostPath).")
@click.option(
    "--allow-service-account-token",
    is_flag=True,
    help="Let podTemplate project credentials of the pod's service account.",
)
@click.option(
    "--log-format",
    type=click.Choice(["plain", "full", "json"]),
    default="full",
    show_default=True,
    help="Format of the log.",
)
def run(
    namespaces: tuple[str, ...],
    liveness_port: int,
    metrics_port: int | None,
    no_progress: bool,
    no_nodes: bool,
    no_network_policies: bool,
    allow_host_path: bool,
    allow_service_account_token: bool,
    log_format: str,
) -> None:
    """Watch GRPOJobs and reconcile them until the process is ended."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    kopf.configure(log_format=kopf.LogFormat[log_format.upper()])
    # These write a line for every event of every pod and for every probe.
    for chatty in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    options = Options(
        ask_progress=not no_progress,
        read_nodes=not no_nodes,
        network_policies=not no_network_policies,
        allowed=Allowed(host_path=allow_host_path, service_account_token=allow_service_account_token),
        metrics_port=metrics_port,
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
@click.option("--namespace", required=True, help="Namespace of the operator.")
@click.option("--selector", required=True, help="Label selector of the operator's pod.")
@click.option("--port", type=int, default=8080, show_default=True, help="Port of the operator's /healthz.")
@click.option("--timeout", type=float, default=30, show_default=True, help="Seconds to wait until nothing is wrong.")
def check(namespace: str, selector: str, port: int, timeout: float) -> None:
    """Check that the API server serves the CRD with all fields of this release, and that the operator answers."""
    wrong = asyncio.run(check_installation(namespace, selector, port, timeout))
    if wrong:
        raise click.ClickException("\n".join(wrong))
    click.echo("the API server knows every field of this release, and the operator answers")


if __name__ == "__main__":
    main()
