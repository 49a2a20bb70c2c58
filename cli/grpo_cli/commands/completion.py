"""`grpo completion`: the script that makes a shell complete commands, options and names of jobs."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    r"""Print the completion script for SHELL.

    \b
    bash: source <(grpo completion bash)
    zsh:  source <(grpo completion zsh)
    fish: grpo completion fish > ~/.config/fish/completions/grpo.fish
    """
    script = get_completion_class(shell)
    assert script is not None, f"click completes {', '.join(SHELLS)}"
    click.echo(script(ctx.find_root().command, {}, "grpo", "_GRPO_COMPLETE").source())
