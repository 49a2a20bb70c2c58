"""Where everything lies: the only module that reads the environment for a folder."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TOOLS = REPO / "devcluster" / "tools"
MANIFESTS = REPO / "devcluster" / "manifests"


def cache_dir() -> Path:
    """What is costly to make and safe to keep: binaries, images, the virtual environment, model files."""
    return Path(os.environ.get("GRPO_CACHE") or Path.home() / ".cache" / "grpo-operator")


def default_state() -> Path:
    """The folder of the one full cluster of this machine."""
    return Path(os.environ.get("GRPO_DEVCLUSTER_STATE", "/var/lib/grpo-devcluster"))


def venv_dir() -> Path:
    """The virtual environment that workload pods get mounted."""
    return Path(os.environ.get("GRPO_VENV") or cache_dir() / "venv")


def hf_cache() -> Path:
    """The Hugging Face cache that workload pods get mounted."""
    return cache_dir() / "hf"
