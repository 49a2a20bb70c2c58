"""`grpo convert`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_cli.convert.conversion import Conversion
from grpo_cli.convert.conversion import convert as convert_sources
from grpo_cli.convert.read import FORMATS, read
from grpo_cli.convert.rows import Kind
from grpo_cli.convert.settle import Given
from grpo_cli.errors import CliError, Exit

EXIT_STRICT = 1
EXIT_LEFT = 5
_STYLES = {Kind.SAME: "green", Kind.DIFFERENT: "yellow", Kind.NOT_NEEDED: "dim", Kind.LEFT: "bold red"}


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--from", "format_", type=click.Choice(FORMATS), help="Format of the files, where they do not show it.")
@click.option("--name", help="Name of the job; by default the model's.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the manifest; by default it is printed.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes of the trainer, where no file says it.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs of each node, where no file says it.")
@click.option("--rows", type=click.IntRange(1), help="Rows of the dataset: what makes steps out of epochs.")
@click.option("--strict", is_flag=True, help="Write nothing, and fail, when an option has no place in a job.")
def convert(
    files: tuple[Path, ...],
    format_: str | None,
    name: str | None,
    output: Path | None,
    nodes: int | None,
    gpus: int | None,
    rows: int | None,
    strict: bool,
) -> None:
    """Make a GRPOJob of configurations of TRL, accelerate, ms-swift or verl.

    FILES are a YAML file of TRL (as `trl grpo --config` takes it) and one of accelerate, or a shell script that calls `trl grpo`, `swift
    rlhf` or `verl.trainer.main_ppo`. It is read and never run. The manifest goes to stdout or --output, what became of every option to
    stderr.

    \b
    Exit codes:
      0  every option has its place in the job
      1  some options have no place, or are to be filled in; nothing was written (--strict)
      2  the command line is wrong, the files cannot be read, or they make no valid job
      5  as 1, without --strict: the manifest was written
    """  # noqa: D301 - click's own mark
    given = Given(nodes=nodes, gpus=gpus, rows=rows)
    try:
        # One trainer's format may be told for all, accelerate's shows itself.
        sources = [source for file in files for source in read(str(file), _text(file), format_)]
        conversion = convert_sources(sources, given, name)
    except ValueError as error:
        raise CliError(str(error), Exit.INVALID) from error
    _report(conversion)
    if strict and conversion.left:
        sys.exit(EXIT_STRICT)
    if output is None:
        print(conversion.manifest, end="")
    else:
        try:
            output.write_text(conversion.manifest)
        except OSError as error:
            raise CliError(f"--output: {error}", Exit.INVALID) from error
    sys.exit(EXIT_LEFT if conversion.left else 0)


def _text(file: Path) -> str:
    return sys.stdin.read() if str(file) == "-" else file.read_text()


def _report(conversion: Conversion) -> None:
    console = Console(stderr=True, highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(max_width=max(30, console.width // 2), overflow="fold")
    table.add_column(overflow="fold")
    for kind in Kind:
        if found := [finding for finding in conversion.findings if finding.kind is kind]:
            table.add_row(Text(f"{kind.value} ({len(found)})", style=_STYLES[kind]))
            for finding in found:
                how = f"-> {finding.to}" + (": " if finding.note else "") if finding.to else ""
                table.add_row(Text(f"  {finding.name}: {finding.value}"), Text(how + finding.note))
    console.print(table)
