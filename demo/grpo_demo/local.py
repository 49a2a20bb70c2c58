"""The demo without a cluster: the ranks of the same manifest run as local processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from grpo_demo import model
from grpo_demo.console import DemoError, run, step
from grpo_demo.report import Run

_LAST_LINE = "run folder: "


def run_job(manifest: Path, output: Path) -> Run:
    """Train with `grpo run`: the same contract and the same ranks, without Kubernetes."""
    hub_cache = model.install()
    with step(f"grpo run {manifest}"):
        environment = {**os.environ, "HF_HUB_CACHE": str(hub_cache), "HF_HUB_OFFLINE": "1"}
        lines = run([Path(sys.executable).with_name("grpo"), "run", manifest, "--output", output], env=environment)
    if not lines or not lines[-1].startswith(_LAST_LINE):
        raise DemoError(f"grpo run did not print its run folder; its last line: {lines[-1] if lines else 'none'}")
    folder = Path(lines[-1].removeprefix(_LAST_LINE))
    return Run(folder, folder / "checkpoints")
