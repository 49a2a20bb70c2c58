"""The base model that a run began with, so that it resumes with the same weights.

A branch on the hub moves, so a model of the hub is pinned to the commit that the branch had when the run began. A
folder can be overwritten, so a fingerprint of samples of its weights is saved: reading all of a large model would take
minutes, and weights that were trained further differ everywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from transformers.utils.hub import cached_file, extract_commit_hash

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import ModelConfig
from grpo_spec.trainer import TrainerConfig
from grpo_workload.data.model_errors import explained

SAMPLES, SAMPLE_BYTES = 32, 2**16  # samples per file, and the size of one

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The base model as it was when a run began."""

    source: str  # model.name or model.path
    revision: str | None  # model.revision
    commit: str | None = None  # commit of a model of the hub
    fingerprint: str | None = None  # fingerprint of a folder

    def __str__(self) -> str:
        if self.fingerprint is not None:
            return f"the weights in {self.source} (fingerprint {self.fingerprint})"
        return f"{self.source} at commit {self.commit}"

    def is_same(self, other: Origin) -> bool:
        """Return whether both are the same weights, even if their names or folders differ."""
        return (self.commit, self.fingerprint) == (other.commit, other.fingerprint)

    def pin(self, config: TrainerConfig) -> TrainerConfig:
        """Return `config` with the commit as its model's revision."""
        return config.model_copy(
            update={"model": config.model.model_copy(update={"revision": self.commit or self.revision})}
        )


def settle_origin(config: TrainerConfig, saved: Origin | None) -> Origin:
    """Return the base model to train with; `saved` is the one that the run began with, None for a new run.

    Raises:
        ConfigError: the model does not exist, or adapters would be trained further on a base model other than theirs;
            names the field.
    """
    origin = find_origin(config.model, saved)
    if saved is not None:
        check_origin(origin, saved, config)
    return origin


def find_origin(model: ModelConfig, saved: Origin | None) -> Origin:
    """Return what `model` is now; if it names the same model and revision as `saved`, return `saved` with its commit.

    Raises:
        ConfigError: neither the hub nor its cache has the model; names the field.
        OSError: the hub does not answer, and its cache does not have the model.
    """
    if model.path is not None:
        return Origin(source=model.path, revision=model.revision, fingerprint=fingerprint(Path(model.path)))
    assert model.name is not None
    if (
        saved is not None
        and saved.commit is not None
        and (saved.source, saved.revision) == (model.name, model.revision)
    ):
        return saved
    with explained(model, "load"):
        file = cached_file(model.name, "config.json", revision=model.revision or "main")
    return Origin(source=model.name, revision=model.revision, commit=extract_commit_hash(file, None))


def check_origin(origin: Origin, saved: Origin, config: TrainerConfig) -> None:
    """Raise ConfigError if adapters would be trained further on a base model other than theirs; says what to do.

    A run that trains all weights has them in its checkpoint. If only its reference for the KL divergence has changed,
    this logs a warning.
    """
    if origin.is_same(saved):
        return
    if config.lora is not None:
        old = (
            f"model.name: {saved.source} and model.revision: {saved.commit}" if saved.commit else "the folder as it was"
        )
        raise ConfigError(
            f"model: the adapters of the checkpoint were trained on {saved}, and this is {origin}; use {old}, or start "
            "a new run without storage.resumeFrom"
        )
    if config.training.beta > 0:
        logger.warning(
            "training.beta: the run began with %s; from now on its KL divergence refers to %s", saved, origin
        )


def fingerprint(folder: Path) -> str:
    """Hash the weights that transformers would load from `folder`: their files' names, sizes, and samples of each.

    Raises:
        ConfigError: a file that an index names is missing, or a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in weight_files(folder):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for index in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: the weights in {folder} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers would load, in its order of preference; empty if there are none."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return [folder / part for part in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return []
