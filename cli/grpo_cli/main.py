"""The commands of `grpo`, each from the module that owns it."""

from __future__ import annotations

import click

from grpo_cli.offline import render, run


@click.group()
def main() -> None:
    """GRPO on Kubernetes: check a job's manifest, see what it becomes, run it."""


for command in (render, run):
    main.add_command(command)
