"""Folders of the devcluster: the only module that reads folders from the environment."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TOOLS = REPO / "devcluster" / "tools"
OLDEST = REPO / "devcluster" / "oldest"
MANIFESTS = REPO / "devcluster" / "manifests"


def cache_dir() -> Path:
    """Return the folder of what is costly to make: binaries, images, the virtual environment, model files."""
    return Path(os.environ.get("GRPO_CACHE") or Path.home() / ".cache" / "grpo-operator")


def default_state() -> Path:
    """Return the folder of this machine's one full cluster."""
    return Path(os.environ.get("GRPO_DEVCLUSTER_STATE", "/var/lib/grpo-devcluster"))


def venv_dir() -> Path:
    """Return the virtual environment, which is mounted into workload pods."""
    return Path(os.environ.get("GRPO_VENV") or cache_dir() / "venv")


def hf_cache() -> Path:
    """Return the Hugging Face cache, which is mounted into workload pods."""
    return cache_dir() / "hf"
