"""The commands of `grpo`, each from the module that owns it."""

from __future__ import annotations

import click

from grpo_cli.completion import completion
from grpo_cli.convert.command import convert
from grpo_cli.diagnose import diagnose
from grpo_cli.errors import TellingGroup
from grpo_cli.jobs import list_jobs, resume, status, submit, suspend, watch
from grpo_cli.logs import logs
from grpo_cli.offline import render, run
from grpo_cli.ui.command import ui


@click.group(cls=TellingGroup)
@click.version_option(package_name="grpo-operator")
def main() -> None:
    """GRPO on Kubernetes: check a job's manifest, see what it becomes, run it here or on a cluster, and see how it goes."""


for command in (render, run, convert, submit, list_jobs, status, watch, logs, suspend, resume, diagnose, ui, completion):
    main.add_command(command)
