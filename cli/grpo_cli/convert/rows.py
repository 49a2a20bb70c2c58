"""What a format's table is made of: one row an option, and what became of an option that was set. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What becomes of an option."""

    SAME = "same"  # a field of the job means the same
    DIFFERENT = "differently"  # a field of the job takes its place, and the note says how
    NOT_NEEDED = "not needed"  # it moves nothing that the job would have to say
    LEFT = "not taken over"  # training would differ: the note says why, and what to do


class LeftError(ValueError):
    """A value that has no place in a job; its text says why, and what to do."""


UNSET: Any = object()

FIELD_OF_FACT = {
    "dataset": "dataset",
    "swift_dataset": "dataset",
    "verl_files": "dataset",
    "dataset_configs": "dataset.config",
    "system": "dataset.systemPrompt",
    "rewards": "rewards",
    "reward_weights": "rewards",
    "reward_file": "rewards",
    "reward_function": "rewards",
    "dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "mixed_precision": "model.dtype",
    "use_cpu": "device.type",
    "per_device": "training.promptsPerStep",
    "accumulation": "training.promptsPerStep",
    "verl_batch": "training.promptsPerStep",
    "verl_mini_batch": "training.promptsPerStep",
    "max_steps": "training.maxSteps",
    "epochs": "training.maxSteps",
    "verl_steps": "training.maxSteps",
    "warmup": "training.warmupSteps",
    "warmup_ratio": "training.warmupSteps",
    "clip_ratio": "training.epsilon",
    "clipping": "training.maxGradNorm",
    "use_kl_loss": "training.beta",
    "kl_coef": "training.beta",
    "norm_by_std": "training.scaleRewards",
    "correct_importance": "training.importanceSamplingCorrection",
    "use_lora": "lora",
    "lora_rank": "lora.r",
    "deepspeed": "parallelism",
    "fsdp": "parallelism",
    "distributed_type": "parallelism.zeroStage",
    "zero_stage": "parallelism.zeroStage",
    "offload": "parallelism.offloadOptimizer",
    "offload_generating": "parallelism.offloadOptimizer",
    "use_vllm": "generation.engine",
    "vllm_mode": "generation.topology",
    "vllm_device": "generation.topology",
    "server_copies": "generation.server",
    "sleep": "generation.colocate.sleepLevel",
    "prompt": "generation.maxModelLen",
    "nodes": "trainer.groups",
    "processes": "trainer.groups",
    "per_node": "trainer.groups",
    "save_steps": "storage.checkpointEverySteps",
}
"""Where `settle` takes each fact to."""


def as_is(value: Any) -> Any:
    """The value."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One option of a format.

    `to` is a path in the job's spec, `fact` a name that `settle` reads; where both are empty nothing is taken over. `default` is what the
    other tool does when the option is not set, given where a job without it would do something else. An option of kind LEFT with one of
    the values `harmless` asks for what happens here anyway.
    """

    name: str
    kind: Kind
    to: str = ""
    fact: str = ""
    note: str = ""
    convert: Callable[[Any], Any] = as_is
    default: Any = UNSET
    harmless: tuple[Any, ...] = ()

    @property
    def field(self) -> str:
        """The field that this option decides, alone or with others; empty when there is none."""
        return self.to or (FIELD_OF_FACT[self.fact] if self.fact else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one option; `name` is as the user wrote it, and `source` is the format it is of."""

    source: str
    name: str
    value: str
    kind: Kind
    to: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """All options of one format, by name. Defaults are those of `release`; names of others are read, too."""

    format: str
    release: str
    rows: dict[str, Row]

    @classmethod
    def of(cls, name: str, release: str, *parts: Iterable[Row]) -> Table:
        """A table of `parts`; a name stands in one of them alone."""
        rows: dict[str, Row] = {}
        for row in (row for part in parts for row in part):
            assert row.name not in rows, f"{name}: two rows for {row.name}"
            rows[row.name] = row
        return cls(name, release, rows)


def same(names: str, to: str, convert: Callable[[Any], Any] = as_is, *, default: Any = UNSET, note: str = "") -> list[Row]:
    """Options (separated by spaces: aliases) that mean what the field `to` does; the first alone has the default."""
    return _rows(names, kind=Kind.SAME, to=to, convert=convert, default=default, note=note)


def differs(
    names: str, note: str, convert: Callable[[Any], Any] = as_is, *, to: str = "", fact: str = "", default: Any = UNSET
) -> list[Row]:
    """Options that a field takes the place of, as `note` says."""
    return _rows(names, kind=Kind.DIFFERENT, to=to, fact=fact, convert=convert, default=default, note=note)


def not_needed(names: str, note: str) -> list[Row]:
    """Options that a job does not have to say."""
    return _rows(names, kind=Kind.NOT_NEEDED, note=note)


def left(names: str, note: str, *harmless: Any) -> list[Row]:
    """Options that have no place in a job, unless they are not set, None, or one of `harmless`."""
    return _rows(names, kind=Kind.LEFT, note=note, harmless=harmless)


def _rows(names: str, *, default: Any = UNSET, **fields: Any) -> list[Row]:
    first, *others = names.split()
    return [Row(name=first, default=default, **fields), *(Row(name=name, **fields) for name in others)]
