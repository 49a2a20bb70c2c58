"""The command line of the operator's image: `run` and `check`."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import uuid

import click
import kopf
from pydantic import ValidationError

from grpo_operator.api.faults import explain
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.kopf_handlers import Options, registry, settings
from grpo_operator.layout.admission import Allowed
from grpo_operator.runtime.check import check as check_installation
from grpo_operator.runtime.complaints import drop_traceback
from grpo_operator.runtime.errors import expected

RECURSION_LIMIT = 100_000
"""Python's json module raises for objects that are nested more deeply than this limit, by default 1,000. API servers
accept 10,000 levels, for example in podTemplate.affinity: one job would end the watch of all jobs."""

GARBAGE_THRESHOLD = 10_000
"""New objects after which Python looks for garbage. With its own 700 it looked through all objects every seven seconds
while 5,000 jobs started, which took a fifth of the operator's time, up to a second at once."""


def _lease(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, str] | None:
    """Read NAMESPACE/NAME."""
    if value is None:
        return None
    namespace, _, name = value.partition("/")
    if not namespace or not name or "/" in name:
        raise click.BadParameter(f"{value!r} is not NAMESPACE/NAME, for example grpo-system/grpo-operator")
    return namespace, name


def _requests(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> PodRequests:
    """Read NAME=QUANTITY, each a field of PodRequests."""
    try:
        return PodRequests.model_validate(dict(value.partition("=")[::2] for value in values))
    except ValidationError as error:
        raise click.BadParameter(explain(error, PodRequests, "requests")) from error


@click.group()
def main() -> None:
    """Run the operator, or check an installation."""


@main.command()
@click.option(
    "--namespace", "namespaces", multiple=True, help="Namespace to watch; may be repeated. Default: all namespaces."
)
@click.option(
    "--lease",
    metavar="NAMESPACE/NAME",
    callback=_lease,
    help="Act only while holding this Lease, so that a second operator can stand by. Default: act at once.",
)
@click.option(
    "--identity",
    help="This operator in the Lease, unique among those that run. Default: the host's name and a random part.",
)
@click.option(
    "--liveness-port",
    type=click.IntRange(1, 65535),
    default=8080,
    show_default=True,
    help="Port of /healthz and /readyz.",
)
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
@click.option("--allow-host-network", is_flag=True, help="Let podTemplate use the network of nodes (hostNetwork).")
@click.option("--allow-privileged", is_flag=True, help="Let podTemplate ask for privileged containers.")
@click.option(
    "--allow-service-account-token",
    is_flag=True,
    help="Let podTemplate project credentials of the pod's service account.",
)
@click.option(
    "--request",
    "requests",
    multiple=True,
    metavar="NAME=QUANTITY",
    callback=_requests,
    help="What pods of new jobs request where podTemplate does not say: cpuPerGpu, memoryPerGpu, and cpu and memory of "
    "pods without GPUs; may be repeated. An empty quantity: nothing. Default: 1, 4Gi, 100m, 256Mi.",
)
@click.option(
    "--log-format",
    type=click.Choice(["plain", "full", "json"]),
    default="full",
    show_default=True,
    help="Format of the log.",
)
@click.option(
    "--log-level",
    type=click.Choice(["info", "debug"]),
    default="info",
    show_default=True,
    help="With debug, the log has a line for each pass over a job: what it saw, what it decided, when it looks again.",
)
def run(
    namespaces: tuple[str, ...],
    lease: tuple[str, str] | None,
    identity: str | None,
    liveness_port: int,
    metrics_port: int | None,
    no_progress: bool,
    no_nodes: bool,
    no_network_policies: bool,
    allow_host_path: bool,
    allow_host_network: bool,
    allow_privileged: bool,
    allow_service_account_token: bool,
    requests: PodRequests,
    log_format: str,
    log_level: str,
) -> None:
    """Watch GRPOJobs and reconcile them until the process is ended."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    gc.set_threshold(GARBAGE_THRESHOLD)
    kopf.configure(log_format=kopf.LogFormat[log_format.upper()])
    for handler in logging.getLogger().handlers:
        handler.addFilter(drop_traceback)
    logging.getLogger("grpo_operator").setLevel(log_level.upper())
    # It writes a line for every event of every job.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    options = Options(
        namespaces=namespaces,
        ask_progress=not no_progress,
        read_nodes=not no_nodes,
        network_policies=not no_network_policies,
        allowed=Allowed(
            host_path=allow_host_path,
            host_network=allow_host_network,
            privileged=allow_privileged,
            service_account_token=allow_service_account_token,
        ),
        requests=requests,
        lease=lease,
        identity=identity or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        health_port=liveness_port,
        metrics_port=metrics_port,
    )
    program = kopf.operator(
        registry=registry(options),
        settings=settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )
    try:
        asyncio.run(program)
    except Exception as error:
        if (known := expected(error)) is None:
            raise
        raise click.ClickException(f"the operator ends, and waits when it is started again: {known.text}") from None


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
