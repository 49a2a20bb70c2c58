"""`grpo convert`. It imports what it needs when it runs, so that `--help` and completion are quick."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from grpo_cli.errors import CliError, Exit

FORMATS = ("trl", "accelerate", "ms-swift", "verl")
EXIT_STRICT = 1
EXIT_LEFT = 5


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
)
@click.option("--from", "format_", type=click.Choice(FORMATS), help="Format of files that do not show it themselves.")
@click.option("--name", help="Name of the job; default: the model's.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the manifest; default: stdout."
)
@click.option("--nodes", type=click.IntRange(1), help="Nodes of the trainer, if no file says it.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs of each node, if no file says it.")
@click.option("--rows", type=click.IntRange(1), help="Rows of the dataset, to compute steps from epochs.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=value",
    help="Value of a variable, or an option, that a script does not set, or not without being run; may be repeated.",
)
@click.option("--strict", is_flag=True, help="Write nothing, and fail, if an option has no place in a job.")
def convert(
    files: tuple[Path, ...],
    format_: str | None,
    name: str | None,
    output: Path | None,
    nodes: int | None,
    gpus: int | None,
    rows: int | None,
    settings: tuple[str, ...],
    strict: bool,
) -> None:
    """Convert a configuration of another trainer to a GRPOJob.

    FILES are a YAML file of TRL (as `trl grpo --config` takes it) and one of accelerate, or a shell script that calls
    `trl grpo`, `swift rlhf`, `verl.trainer.main_ppo` or `openrlhf.cli.train_ppo_ray`, or a script in Python that calls
    TRL's GRPOTrainer. Scripts are read and never run. The manifest goes to stdout or --output. What became of every
    option goes to stderr.

    \b
    Exit codes:
      0  every option has its place in the job
      1  some options have no place, or are to be filled in; nothing was written (--strict)
      2  the command line is wrong, the files cannot be read, or they make no valid job
      5  as 1, without --strict: the manifest was written
    """  # noqa: D301 - click's own mark
    from grpo_cli.convert.conversion import convert as convert_sources
    from grpo_cli.convert.read import read
    from grpo_cli.convert.report import report
    from grpo_cli.convert.settle import Given

    variables = dict(_setting(text) for text in settings)
    try:
        # --from is for the trainer's files; accelerate's are recognised whatever it says.
        sources = [source for file in files for source in read(str(file), _text(file), format_, variables)]
        if unused := variables.keys() - {name for source in sources for name in source.used}:
            raise ValueError(f"--set {min(unused)}: no script uses it, or the script sets it itself")
        conversion = convert_sources(sources, Given(nodes=nodes, gpus=gpus, rows=rows), name)
    except ValueError as error:
        raise CliError(str(error), Exit.INVALID) from error
    report(conversion)
    if strict and conversion.left:
        sys.exit(EXIT_STRICT)
    if output is None:
        print(conversion.manifest, end="")
    else:
        try:
            output.write_text(conversion.manifest)
        except OSError as error:
            raise CliError(f"--output {output} cannot be written: {error}", Exit.INVALID) from error
    sys.exit(EXIT_LEFT if conversion.left else 0)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise CliError(f"--set {text}: write NAME=value", Exit.INVALID)
    return name, value


def _text(file: Path) -> str:
    return sys.stdin.read() if str(file) == "-" else file.read_text()
