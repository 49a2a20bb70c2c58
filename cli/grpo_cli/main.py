"""`grpo`: the table of its commands, each imported when it is used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from grpo_cli.commands.options import kubectl_options
from grpo_cli.errors import Exit

CLUSTER_PACKAGES = ("kubernetes", "rich")


class Entry(NamedTuple):
    """The place of a command, the line about it in `grpo --help`, and whether it runs without CLUSTER_PACKAGES."""

    module: str
    attribute: str
    help: str
    offline: bool = False


COMMANDS = {
    "check-model": Entry(
        "grpo_cli.commands.check_model",
        "check_model",
        "Say what works with a model, before it is downloaded",
        offline=True,
    ),
    "completion": Entry("grpo_cli.commands.completion", "completion", "Print the completion script for SHELL"),
    "convert": Entry("grpo_cli.commands.convert", "convert", "Convert a configuration of another trainer to a GRPOJob"),
    "cp": Entry("grpo_cli.commands.copy", "cp", "Copy a file or folder between this machine and a claim"),
    "diagnose": Entry("grpo_cli.commands.jobs", "diagnose", "Collect what a bug report about JOB needs"),
    "export": Entry("grpo_cli.commands.copy", "export", "Fetch the newest exported model of JOB"),
    "list": Entry("grpo_cli.commands.jobs", "list_jobs", "List jobs, oldest first"),
    "logs": Entry("grpo_cli.commands.jobs", "logs", "Print the logs of all pods of JOB, in order of time"),
    "plan": Entry("grpo_cli.commands.plan", "plan", "Say whether the job fits on its GPUs", offline=True),
    "render": Entry("grpo_cli.commands.offline", "render", "Print what the job becomes", offline=True),
    "resume": Entry("grpo_cli.commands.jobs", "resume", "Resume a suspended JOB"),
    "run": Entry("grpo_cli.commands.offline", "run", "Run the job's pods as processes of this machine", offline=True),
    "status": Entry("grpo_cli.commands.jobs", "status", "Show JOB on one screen"),
    "submit": Entry("grpo_cli.commands.jobs", "submit", "Create or change the GRPOJobs and other objects of MANIFEST"),
    "suspend": Entry("grpo_cli.commands.jobs", "suspend", "Suspend JOB: save a checkpoint and give its GPUs back"),
    "ui": Entry("grpo_cli.commands.ui", "ui", "Show JOB, or a run's folder, on a local page"),
    "watch": Entry("grpo_cli.commands.jobs", "watch", "Show the status of JOB until it has ended"),
}


class LazyGroup(click.Group):
    """The commands of COMMANDS; `--help` and completion of names import none, a command imports its own module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands that the installed packages allow: the workload's image has no CLUSTER_PACKAGES."""
        complete = all(map(find_spec, CLUSTER_PACKAGES))
        return [name for name, entry in COMMANDS.items() if complete or entry.offline]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        entry = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(entry.module), entry.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names with their lines of COMMANDS."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, f"{COMMANDS[name].help}.") for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin with `incomplete`, or the options."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name].help) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse kubectl's options before the command: what they say holds unless it stands behind the command too."""
        rest = super().parse_args(ctx, args)
        given = {name: value for name, value in ctx.params.items() if value is not None}
        ctx.default_map = dict.fromkeys(COMMANDS, given)
        return rest

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that `args` begin with, or fail naming what to install, or options that it has not."""
        if args[0] in COMMANDS and args[0] not in self.list_commands(ctx):
            offline = ", ".join(self.list_commands(ctx))
            ctx.fail(f"{args[0]} needs pip install 'grpo-operator[cli]'; without it there are {offline}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            known = {option.name for option in command.params}
            for given in (one for one, value in ctx.params.items() if value is not None and one not in known):
                ctx.fail(f"{name} asks no cluster, and takes no --{given}")
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; Ctrl-C ends it with an exit code, not with a traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(Exit.INTERRUPTED)


@click.group(cls=LazyGroup)
@click.version_option(package_name="grpo-operator")
@kubectl_options
def main(**_: str | None) -> None:
    """GRPO on Kubernetes: check a job's manifest, see what it becomes, run it here or on a cluster, and follow it."""
