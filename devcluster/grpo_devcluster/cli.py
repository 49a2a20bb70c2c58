"""Command line of the devcluster."""

from typing import Literal

import click

from grpo_devcluster import binaries


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A real Kubernetes on this machine: control plane, nodes, images."""


@main.command()
@click.option("--only", type=click.Choice(["controlplane", "all"]), default="all", show_default=True)
def build(only: Literal["controlplane", "all"]) -> None:
    """Build the Kubernetes components from their pinned Go modules."""
    binaries.build(only)
