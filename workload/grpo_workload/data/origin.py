"""The rows that a run began with: an attempt that resumes must find the same ones, and so must every rank.

A branch on the hub moves, so a dataset of the hub is read at the commit that the branch had when the run began. A file
can be overwritten, so the number of rows and a fingerprint of them are saved. It is one of the rows as they are read,
before `dataset.preprocess`: neither the place nor the format of the files, nor other splits beside them, matter.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig
from grpo_spec.words import counted
from grpo_workload.data.dataset import Questions, find_commit
from grpo_workload.data.prompt_source import PromptSource, Rows

MAX_BYTES = 2**25
"""Bytes of rows that a fingerprint reads. Datasets up to this size are read whole, in less than a second."""

MAX_WITH_IMAGES = 1000
"""Rows that are read where they have images: each may be a file of its own."""

_CHUNK = 1000  # rows
_IMAGE = "struct<bytes: binary, path: string>"  # as `datasets` stores images

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrigin:
    """A dataset as it was when a run began to read it."""

    source: str  # dataset.name, dataset.path, or the dataset of reasoning-gym
    commit: str | None  # commit of a dataset of the hub
    rows: int
    fingerprint: str
    first_step: int = 0  # step that began with the first row of the order

    def difference(self, before: DataOrigin) -> str:
        """Say in which way these are other rows than `before`; empty if they are the same."""
        changes = [f"{counted(self.rows, 'row')} instead of {before.rows}"] if self.rows != before.rows else []
        if self.fingerprint != before.fingerprint:
            changes.append(f"fingerprint {self.fingerprint} instead of {before.fingerprint}")
        if self.commit != before.commit and self.commit and before.commit:
            changes.append(f"commit {self.commit} instead of {before.commit}")
        return ", ".join(changes)


def pin(dataset: DatasetConfig, saved: DataOrigin | None, *, is_own: bool) -> DatasetConfig:
    """Return `dataset` with a commit as its revision if it is of the hub: the saved one, so far as the job may have it.

    A job that goes on from another run (not `is_own`) keeps that one's commit unless it sets a revision.

    Raises:
        ConfigError: neither the hub nor its cache has the dataset; names the field.
    """
    if dataset.name is None:
        return dataset
    if saved is not None and saved.source == dataset.name and (is_own or dataset.revision is None):
        return dataset.model_copy(update={"revision": saved.commit})
    return dataset.model_copy(update={"revision": find_commit(dataset)})


def origin_of(pinned: DatasetConfig, source: PromptSource) -> DataOrigin:
    """Return the origin of a dataset that was opened as `pin` returned it."""
    return DataOrigin(
        source=pinned.source, commit=pinned.revision, rows=len(source), fingerprint=fingerprint(source.rows)
    )


def settle_data(
    field: str, origin: DataOrigin, saved: DataOrigin | None, *, run: str, is_own: bool, step: int
) -> DataOrigin:
    """Return `origin` with the step at which its order began; `saved` is that of the checkpoint, None if it has none.

    Args:
        field: the field that names the dataset.
        origin: what was found now.
        saved: what the checkpoint was trained on. Those of earlier releases do not say it.
        run: the job's run, to continue from.
        is_own: whether the checkpoint is of this run, and not of the one that storage.resumeFrom names.
        step: the step at which training starts.

    Raises:
        ConfigError: the rows of a run have changed; says what has, and how to go on.
    """
    if saved is None:
        return origin
    if not (difference := origin.difference(saved)):
        return replace(origin, first_step=saved.first_step)
    if is_own:
        raise ConfigError(
            f"{field}: {origin.source} has changed since the run began: {difference}. A job keeps its rows to its "
            f"end. To go on from its checkpoint with these, or with the old ones put back, create a job with "
            f"storage.resumeFrom: {run}"
        )
    logger.warning(
        "%s: the rows are not those of the run that storage.resumeFrom names (%s); their order begins again",
        field,
        difference,
    )
    return replace(origin, first_step=step)


def fingerprint(rows: Rows) -> str:
    """Hash rows in their order, with their columns: all of them, or as many as the bounds above allow, drawn at random.

    The same ones are drawn for the same number of rows, whatever the seed of a job, so that jobs compare. Images that
    rows only name are known by their files' names and sizes, and problems of reasoning-gym by what generates them.
    """
    digest = hashlib.sha256()
    for row in _sample(rows):
        digest.update(json.dumps(row, sort_keys=True, default=_hashed).encode())
    return digest.hexdigest()[:16]


def _sample(rows: Any) -> Iterator[Any]:
    if isinstance(rows, Questions):
        yield rows.recipe
        return
    count = len(rows)
    limit, has_images = MAX_BYTES * count // max(rows.data.nbytes, 1), _IMAGE in str(rows.data.schema)
    drawn = _drawn(count, max(1, min(limit, MAX_WITH_IMAGES) if has_images else limit))
    stored = rows.with_format("arrow")  # images are not decoded
    for start in range(0, len(drawn), _CHUNK):
        for row in stored[drawn[start : start + _CHUNK]].to_pylist():
            yield _without_folders(row) if has_images else row


def _drawn(count: int, limit: int) -> list[int]:
    """Return `limit` of `count` indices in their order, or all."""
    if count <= limit:
        return list(range(count))
    return [int(index) for index in np.sort(np.random.default_rng(count).choice(count, limit, replace=False))]


def _without_folders(value: Any) -> Any:
    """Replace an image that a row only names by its file's name and size: a cache may be in another folder."""
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"bytes", "path"} and value["path"] is not None:
        path = Path(value["path"])
        of_file = path.stat().st_size if value["bytes"] is None and path.is_file() else value["bytes"]
        return [path.name, of_file]
    return {name: _without_folders(one) for name, one in value.items()}


def _hashed(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)
