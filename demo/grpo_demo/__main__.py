"""`python -m grpo_demo [MANIFEST]`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click

from grpo_demo import cluster, host, local
from grpo_demo.console import DemoError, console
from grpo_demo.report import report

ERRORS = (DemoError, RuntimeError, LookupError, ValueError, OSError, subprocess.SubprocessError)
"""Errors that a person can fix; the devcluster's functions raise all of these."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "manifest", default="examples/quickstart.yaml", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--local", "force_local", is_flag=True, help="Run the ranks as local processes, without a cluster.")
@click.option("--output", default="demo-out", show_default=True, type=click.Path(file_okay=False, path_type=Path))
def main(manifest: Path, force_local: bool, output: Path) -> None:
    """Train the job of MANIFEST on a Kubernetes cluster started for it, and show what the model has learned.

    Exits 0 only if the job completed and its reward rose.
    """
    start = time.monotonic()
    why = "because of --local" if force_local else host.obstacle()
    if why is None:
        console.print(
            "This machine can host a cluster: the demo runs on a real Kubernetes of two nodes.", soft_wrap=True
        )
    else:
        console.print(f"No cluster ({why}): the demo runs the same manifest with local processes.", soft_wrap=True)
    try:
        run = local.run_job(manifest, output / "run") if why else cluster.run_job(manifest)
        verdict = report(run, output)
    except ERRORS as error:
        console.print(
            f"\nfailed after {time.monotonic() - start:.0f} s: {error}", style="bold red", markup=False, soft_wrap=True
        )
        sys.exit(1)
    finally:
        if why is None:
            cluster.how_to_look_around()
    style, word = ("bold green", "learned") if verdict.rose else ("bold red", "did not learn")
    console.print(
        f"\nThe model {word}: {verdict}. {(time.monotonic() - start) / 60:.1f} minutes after the setup of Python.",
        style=style,
        soft_wrap=True,
    )
    sys.exit(0 if verdict.rose else 1)


if __name__ == "__main__":
    main()
