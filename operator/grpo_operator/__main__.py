"""`python -m grpo_operator run`: the operator."""

from __future__ import annotations

import asyncio
import logging

import click
import kopf

from grpo_operator.handlers import Options, registry, settings


@click.group()
def main() -> None:
    """Reconcile GRPOJobs."""


@main.command()
@click.option("--namespace", "namespaces", multiple=True, help="Namespace to watch; may be repeated. All of them when not given.")
@click.option("--liveness-port", type=int, default=8080, show_default=True, help="Port of /healthz.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Port of /metrics. Not served when not given.")
@click.option("--no-progress", is_flag=True, help="Do not ask launchers for progress: for clusters whose pods are not real.")
@click.option("--log-format", type=click.Choice(["plain", "full", "json"]), default="full", show_default=True, help="Form of the log.")
def run(namespaces: tuple[str, ...], liveness_port: int, metrics_port: int | None, no_progress: bool, log_format: str) -> None:
    """Watch GRPOJobs and reconcile them until told to end."""
    kopf.configure(log_format=kopf.LogFormat[log_format.upper()])
    for chatty in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):  # a line for every event of every pod, and every probe
        logging.getLogger(chatty).setLevel(logging.WARNING)
    asyncio.run(
        kopf.operator(
            registry=registry(Options(ask_progress=not no_progress, metrics_port=metrics_port)),
            settings=settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            liveness_endpoint=f"http://0.0.0.0:{liveness_port}/healthz",
        )
    )


if __name__ == "__main__":
    main()
