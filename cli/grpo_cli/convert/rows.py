"""A format's table with one row per option, and what became of an option that was set. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What becomes of an option."""

    SAME = "same"  # a field of the job means the same
    DIFFERENT = "differently"  # a field of the job takes its place, and the note says how
    NOT_NEEDED = "not needed"  # a job needs nothing in its place
    LEFT = "not taken over"  # training will differ: the note says why, and what to do


class LeftError(ValueError):
    """A value that has no place in a job; its text says why, and what to do."""


UNSET: Any = object()

_FACTS_OF_FIELD = {
    "dataset": "dataset swift_dataset verl_files",
    "dataset.config": "dataset_configs",
    "dataset.systemPrompt": "system",
    "rewards": "rewards reward_weights reward_file reward_function overlong_buffer overlong_length overlong_cache "
    "overlong_weight",
    "model.dtype": "dtype bf16 fp16 mixed_precision",
    "model.freezeVisionTower": "lora_excludes_vision",
    "device.type": "use_cpu",
    "training.promptsPerStep": "per_device accumulation verl_mini_batch",
    "training.maxResampleTimes": "dynamic_sample resample_times",
    "training.stepsPerGeneration": "steps_per_generation generation_batch verl_batch",
    "training.maxSteps": "max_steps epochs verl_steps",
    "training.lrSchedulerKwargs": "schedule_arguments min_lr_ratio num_cycles",
    "training.warmupSteps": "warmup warmup_ratio",
    "training.reportTo": "trackers",
    "training.epsilon": "clip_ratio",
    "training.importanceSamplingLevel": "verl_loss",
    "training.maxGradNorm": "clipping",
    "training.beta": "use_kl_loss kl_coef kl_loss_type",
    "training.klInReward": "kl_in_reward kl_in_reward_coef",
    "training.scaleRewards": "norm_by_std",
    "training.importanceSamplingCorrection": "correct_importance rollout_is rollout_is_threshold bypass",
    "evaluation.dataset": "eval_dataset",
    "evaluation.dataset.split": "eval_split",
    "evaluation.everySteps": "eval_strategy eval_steps",
    "evaluation.atStart": "eval_at_start",
    "evaluation.numGenerations": "eval_generations",
    "evaluation.temperature": "eval_temperature eval_samples",
    "evaluation.saveBest": "load_best",
    "evaluation.metricForBestModel": "best_metric",
    "evaluation.greaterIsBetter": "greater_is_better",
    "lora": "use_lora",
    "lora.r": "lora_rank",
    "parallelism": "deepspeed fsdp",
    "parallelism.offloadActivations": "sequence_parallel",
    "parallelism.zeroStage": "distributed_type zero_stage",
    "parallelism.offloadOptimizer": "offload offload_generating",
    "generation.engine": "use_vllm",
    "generation.topology": "vllm_mode vllm_device",
    "generation.server": "server_copies",
    "generation.colocate.sleepLevel": "sleep",
    "generation.maxModelLen": "prompt",
    "trainer.groups": "nodes processes per_node",
    "storage.checkpointEverySteps": "save_steps save_strategy",
}
FIELD_OF_FACT = {fact: field for field, facts in _FACTS_OF_FIELD.items() for fact in facts.split()}
"""The field that `settle` computes from each fact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One option of a format.

    `to` is a path in the job's spec, `fact` a name that `settle` reads; when both are empty nothing is taken over.
    `default` is what the other tool does when the option is not set, given where a job's own default differs.
    `harmless` are values of an option of kind LEFT that ask for what a job does anyway; they are not reported.
    """

    name: str
    kind: Kind
    to: str = ""
    fact: str = ""
    note: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    default: Any = UNSET
    harmless: tuple[Any, ...] = ()

    @property
    def field(self) -> str:
        """The field that this option decides, alone or with others; empty when there is none."""
        return self.to or (FIELD_OF_FACT[self.fact] if self.fact else "")


Rows = list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one option."""

    source: str  # the format
    name: str  # as the user wrote it
    value: str
    kind: Kind
    to: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """All options of one format, by name. Defaults are those of `release`; names of other releases are read, too."""

    format: str
    release: str
    rows: dict[str, Row]

    @classmethod
    def of(cls, name: str, release: str, *parts: Rows) -> Table:
        """Return a table of `parts`; an option has one row."""
        all_rows = rows(*parts)
        table = cls(name, release, {row.name: row for row in all_rows})
        assert len(table.rows) == len(all_rows), f"{name}: two rows for one option"
        return table


def same(options: str, to: str, convert: Callable[[Any], Any] = lambda value: value, *, default: Any = UNSET) -> Rows:
    """Options (aliases, separated by spaces) that mean what the field `to` does; the first alone has the default."""
    return _rows(options, default, kind=Kind.SAME, to=to, convert=convert)


def differs(options: str, to: str, convert: Callable[[Any], Any], note: str, *, default: Any = UNSET) -> Rows:
    """Options that become a field as `note` says; `to` is the field, or "@" and the name of a fact, or empty."""
    target = {"fact": to[1:]} if to.startswith("@") else {"to": to}
    return _rows(options, default, kind=Kind.DIFFERENT, convert=convert, note=note, **target)


def not_needed(options: str, note: str) -> Rows:
    """Options that a job does not need."""
    return _rows(options, kind=Kind.NOT_NEEDED, note=note)


def left(options: str, note: str, *harmless: Any) -> Rows:
    """Options that have no place in a job, unless they are not set, None, or one of `harmless`."""
    return _rows(options, kind=Kind.LEFT, note=note, harmless=harmless)


def rows(*parts: Rows) -> Rows:
    """Join parts of a table."""
    return [row for part in parts for row in part]


def under(section: str, *parts: Rows) -> Rows:
    """Join parts of a table whose options are in a section: `section` begins their names."""
    return [replace(row, name=f"{section}{row.name}") for row in rows(*parts)]


def _rows(options: str, default: Any = UNSET, **fields: Any) -> Rows:
    first, *others = options.split()
    return [Row(name=first, default=default, **fields), *(Row(name=name, **fields) for name in others)]
