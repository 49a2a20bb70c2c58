"""A soak of the operator: random work under random faults, and what must have come of it.

A real control plane with fake nodes and the operator as a process. Jobs are created, failed, evicted, suspended,
edited, finished, deleted and created again; the API server is killed, stopped and made to forget what watches need; the
operator is killed and frozen, and a second one comes and goes. After each round every job must be as expected, and the
operator is measured. Prints one JSON line, or what is wrong and where the logs are.

    python -m benchmarks.control_plane.soak --minutes 60
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common.runs import versions
from support.soak.run import Options, SoakError, soak


@click.command()
@click.option("--minutes", default=60.0, help="How long to work.")
@click.option("--seed", default=0, help="Seed of what is done; when it happens differs from run to run.")
@click.option("--jobs", default=12, help="Jobs that exist at most.")
@click.option("--round-seconds", default=120.0, help="Seconds of work before the jobs must come to rest.")
@click.option("--output", type=click.Path(path_type=Path), help="File for the line; standard output if not given.")
@click.option("--share-with-lease", default=1 / 3, help="Share of the time in which operators hold a Lease.")
def main(minutes: float, output: Path | None, **options: Any) -> None:
    """Soak and print."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        result = soak(folder, Options(seconds=minutes * 60, **options))
    except (SoakError, AssertionError) as error:
        raise click.ClickException(f"seed {options['seed']}, logs in {folder}: {error}") from error
    result |= {
        "versions": versions("kopf", "kubernetes"),
        "command": " ".join(["python -m benchmarks.control_plane.soak", *sys.argv[1:]]),
    }
    line = json.dumps(result) + "\n"
    sys.stdout.write(line) if output is None else output.write_text(line)


if __name__ == "__main__":
    main()
