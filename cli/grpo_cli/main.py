"""The commands of `grpo`, each from the module that owns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from grpo_cli.offline import render, run

CLUSTER_PACKAGES = ("kubernetes", "rich")


class OfflineGroup(click.Group):
    """Commands that need a manifest alone: all that there are in the workload's image, which lacks what asks a cluster."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command that `args` begin with."""
        if self.get_command(ctx, args[0]) is None:
            ctx.fail(f"{args[0]} is none of {', '.join(self.commands)}; all others need pip install 'grpo-operator[cli]'")
        return super().resolve_command(ctx, args)


group: type[click.Group] = OfflineGroup
commands: Sequence[click.Command] = ()
try:
    from grpo_cli.completion import completion
    from grpo_cli.convert.command import convert
    from grpo_cli.diagnose import diagnose
    from grpo_cli.errors import TellingGroup
    from grpo_cli.jobs import list_jobs, resume, status, submit, suspend, watch
    from grpo_cli.logs import logs
    from grpo_cli.ui.command import ui
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in CLUSTER_PACKAGES:
        raise
else:
    group, commands = TellingGroup, (convert, submit, list_jobs, status, watch, logs, suspend, resume, diagnose, ui, completion)


@click.group(cls=group)
@click.version_option(package_name="grpo-operator")
def main() -> None:
    """GRPO on Kubernetes: check a job's manifest, see what it becomes, run it here or on a cluster, and see how it goes."""


for command in (render, run, *commands):
    main.add_command(command)
