"""Which weights a run began with, so that it goes on with the same: a branch on the hub moves, and a folder can be written anew.

A model of the hub is pinned to the commit that its branch was at when the run began. Of a folder, samples of its weights are remembered:
reading all of a large model would take minutes, and weights that were trained further differ everywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from transformers.utils.hub import cached_file, extract_commit_hash

from grpo_workload.config import TrainerConfig
from grpo_workload.inputs import ModelConfig

SAMPLES, SAMPLE_BYTES = 32, 2**16  # of each file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A model as it was when a run began."""

    source: str  # model.name or model.path
    revision: str | None  # as it was asked for
    commit: str | None = None  # of a model of the hub
    fingerprint: str | None = None  # of a folder

    def __str__(self) -> str:
        if self.fingerprint is not None:
            return f"the weights in {self.source} (fingerprint {self.fingerprint})"
        return f"{self.source} at commit {self.commit}"

    def is_same(self, other: Origin) -> bool:
        """Whether both are the same weights, wherever they were found."""
        return (self.commit, self.fingerprint) == (other.commit, other.fingerprint)

    def pin(self, config: TrainerConfig) -> TrainerConfig:
        """`config` with the commit as its model's revision."""
        return config.model_copy(update={"model": config.model.model_copy(update={"revision": self.commit or self.revision})})


def settle_origin(config: TrainerConfig, saved: Origin | None) -> Origin:
    """The weights that a run begins with, or goes on upon; `saved` is what it began with.

    Raises:
        ValueError: there is no such model, or adapters would go on upon other weights than those they were trained on; names the field.
    """
    origin = find_origin(config.model, saved)
    if saved is not None:
        check_origin(origin, saved, config)
    return origin


def find_origin(model: ModelConfig, saved: Origin | None) -> Origin:
    """What `model` is now, or for a run that asks for what it asked for when it was `saved`, the commit that it was then.

    Raises:
        ValueError: the hub or its cache has no such model; names the field.
    """
    if model.path is not None:
        return Origin(source=model.path, revision=model.revision, fingerprint=fingerprint(Path(model.path)))
    assert model.name is not None
    if saved is not None and saved.commit is not None and (saved.source, saved.revision) == (model.name, model.revision):
        return saved
    try:
        file = cached_file(model.name, "config.json", revision=model.revision or "main")
    except (OSError, ValueError) as error:
        raise ValueError(f"model.name: cannot load {model.name}: {error}") from error
    return Origin(source=model.name, revision=model.revision, commit=extract_commit_hash(file, None))


def check_origin(origin: Origin, saved: Origin, config: TrainerConfig) -> None:
    """ValueError where a run with adapters would go on upon other weights than those they were trained on; says how to get them back.

    A run that trains all weights has them in its checkpoint; where it only compares itself to other initial ones, that is told.
    """
    if origin.is_same(saved):
        return
    if config.lora is not None:
        old = f"model.name: {saved.source} and model.revision: {saved.commit}" if saved.commit else "the folder as it was"
        raise ValueError(
            f"model: the adapters of the checkpoint were trained on {saved}, and this is {origin}; use {old}, or start a new run without "
            "storage.resumeFrom"
        )
    if config.training.beta > 0:
        logger.warning("training.beta: the run began with %s, and takes its KL divergence from %s from here on", saved, origin)


def fingerprint(folder: Path) -> str:
    """Of the weights that transformers would load from `folder`: their files' names, sizes, and `SAMPLES` pieces of each.

    Raises:
        ValueError: a file that an index names is missing, or one cannot be read.
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
        raise ValueError(f"model.path: the weights in {folder} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def weight_files(folder: Path) -> list[Path]:
    """Files of weights in the order in which transformers looks for them; empty where it would find none."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return [folder / part for part in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return []
