"""Prompts from a dataset: which ones each step trains on, as text and as token ids."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from grpo_workload.algorithm.samples import Prompt, Text
from grpo_workload.data.bucket import fetch
from grpo_workload.data.images import ImagePrompts
from grpo_workload.data.overlong import PromptLimit
from grpo_workload.data.prompt_maker import Preprocess, PreprocessError, PromptMaker, fill, what_was_raised
from grpo_workload.ranks.seeds import prompt_seed
from grpo_workload.spec.errors import ConfigError
from grpo_workload.spec.inputs import DatasetConfig, ReasoningGymDataset

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
# Files that mark a folder as written by save_to_disk; any other folder is read as a folder of data files.
_SAVED = ("state.json", "dataset_dict.json")

_SUBSTITUTES = 1000  # number of rows that are tried in place of one that is too long

Scorer = Callable[[str, Prompt], float]
"""reasoning-gym's score of an answer to a prompt."""


class Rows(Protocol):
    """A dataset: rows by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Draw:
    """The row to use for one position of a step."""

    index: int  # index of the row
    seed: int  # seed of the prompt: see `seeds.prompt_seed`


class PromptSource:
    """The prompts of a dataset, in an order that depends only on the seed and the step.

    A resumed run therefore sees the same prompts. If rows are shuffled, every epoch (pass through the dataset) has its
    own order; a step that reaches past the end of one continues in the next, so no prompt is skipped. It pickles if its
    parts do.
    """

    def __init__(
        self,
        rows: Rows,
        to_prompt: Callable[[int, Mapping[str, Any]], Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        preprocess: Preprocess | None = None,
        scorer: Scorer | None = None,
        limit: PromptLimit | None = None,
    ) -> None:
        """Make prompts of `rows` by `preprocess`, if given, and then `to_prompt(index, row)`."""
        self._rows = rows
        self._to_prompt = to_prompt
        self._seed, self._shuffle = seed, shuffle
        self._preprocess = preprocess
        self.scorer, self.limit = scorer, limit
        self.has_images = False  # whether the first prompt has images

    @property
    def is_scannable(self) -> bool:
        """Whether reading all rows shows their prompts, and is cheap: rows are neither generated nor changed.

        The user's function may be slow, and differ at each step. Images take long to decode.
        """
        return self.limit is not None and self._preprocess is None and self.scorer is None and not self.has_images

    def __len__(self) -> int:
        """Number of prompts in the dataset."""
        return len(self._rows)

    def draw(self, step: int, slot: int, prompts_per_step: int) -> Draw:
        """Return the row of a prompt of optimizer step `step` (counted from 0).

        Args:
            step: number of the step.
            slot: the prompt's position among all ranks' prompts of the step; or more, for further prompts: each
                `prompts_per_step` of them are different rows, drawn from the whole dataset.
            prompts_per_step: number of prompts in a step.
        """
        seed = prompt_seed(self._seed, step, slot)
        if (round_number := slot // prompts_per_step) > 0:
            rows = _further(len(self), (self._seed, step, round_number), prompts_per_step)
            return Draw(int(rows[slot % prompts_per_step % len(rows)]), seed)
        epoch, offset = divmod(step * prompts_per_step + slot, len(self))
        index = int(_order(len(self), self._seed, epoch)[offset]) if self._shuffle else offset
        return Draw(index, seed)

    def prepare(self, draw: Draw) -> Prompt:
        """Return the prompt of a draw, whose length fits.

        In place of a row that is skipped, it is of rows drawn with the seed of the draw: the same ones in every process
        and attempt, whatever was skipped before.

        Raises:
            PromptError: the row cannot be used, or is too long.
            PreprocessError: a retry may help.
        """
        prompt, limit = self.make(draw), self.limit
        if limit is None or limit.fits(prompt):
            return prompt
        if limit.action == "truncate" and prompt.images is None:  # a part of an image has no meaning
            return limit.truncated(prompt)
        if limit.action == "skip":
            for index in np.random.default_rng(draw.seed).integers(len(self), size=_SUBSTITUTES):
                other = self.make(Draw(int(index), draw.seed))
                if limit.fits(other):
                    return dataclasses.replace(other, is_overlong=True)
        raise limit.error(prompt)

    def make(self, draw: Draw) -> Prompt:
        """Read the row and make its prompt, however long it is. Raises as `prepare` does."""
        try:
            row = self._rows[draw.index]
        except Exception as error:  # storage and decoders may raise anything
            raise PreprocessError(f"dataset: reading row {draw.index} {what_was_raised(error)}") from error
        if self._preprocess is not None:
            row = self._preprocess(draw.index, row, draw.seed)
        return dataclasses.replace(self._to_prompt(draw.index, row), seed=draw.seed)

    def batch(self, step: int, prompts_per_step: int) -> list[Prompt]:
        """Prepare all prompts of a step in this process."""
        return [self.prepare(self.draw(step, position, prompts_per_step)) for position in range(prompts_per_step)]


def load_prompts(
    config: DatasetConfig,
    tokenizer: Any,
    *,
    seed: int,
    limit: PromptLimit | None = None,
    images: ImagePrompts | None = None,
) -> PromptSource:
    """Open the dataset, and prepare its first prompt as a check.

    `dataset.preprocess` changes rows first. A prompt that is a string is tokenized as it is. Messages go through the
    tokenizer's chat template with a generation prompt, and so do problems of reasoning-gym if the tokenizer has one.
    `images` puts those of rows into their messages.

    Raises:
        ConfigError: the dataset cannot be found or read, is empty, lacks a `prompt` column, or does not fit preprocess,
            promptTemplate, systemPrompt or the tokenizer; the message names the field. Network errors are raised as
            they are: trying again may help.
    """
    if config.reasoning_gym is not None:
        source = _reasoning_gym_source(config, config.reasoning_gym, tokenizer, seed, images)
    else:
        source = _hugging_face_source(config, PromptMaker(config, tokenizer, images=images), seed)
    source.has_images = source.make(source.draw(0, 0, 1)).images is not None
    source.limit = limit
    return source


@lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


@lru_cache(maxsize=2)
def _further(num_rows: int, seed: tuple[int, ...], count: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).choice(num_rows, min(count, num_rows), replace=False)


def _hugging_face_source(config: DatasetConfig, maker: PromptMaker, seed: int) -> PromptSource:
    rows, preprocess = _open(config), _preprocess(config)
    if not len(rows):
        raise _no_rows(config)
    if preprocess is None and "prompt" not in rows.column_names:
        raise ConfigError(
            f"dataset: {config.name or config.path} has no column `prompt` (text, or a list of messages); "
            f"its columns are {', '.join(rows.column_names)}. Rename the one that holds the prompt, "
            "or build the prompt in dataset.preprocess"
        )
    return PromptSource(rows, maker, seed=seed, shuffle=config.shuffle, preprocess=preprocess)


def _preprocess(config: DatasetConfig) -> Preprocess | None:
    return None if config.preprocess is None else Preprocess(config.preprocess)


def _open(config: DatasetConfig) -> Any:
    import datasets  # It takes seconds, and jobs with reasoning-gym do not need it.

    field = "dataset.name" if config.name is not None else "dataset.path"
    try:
        if config.name is not None:
            return datasets.load_dataset(config.name, config.config, split=config.split)
        assert config.path is not None
        in_bucket = "://" in config.path
        path = fetch(config.path, Path(datasets.config.HF_DATASETS_CACHE)) if in_bucket else Path(config.path)
        if any((path / name).exists() for name in _SAVED):
            return _split(datasets.load_from_disk(str(path)), config.split)
        if path.is_dir():
            return datasets.load_dataset(str(path), split=config.split)
        if not path.exists():
            raise FileNotFoundError(
                "there is no such file or folder in the container; is its volume mounted in every trainer pod?"
            )
        if path.suffix not in _FORMATS:
            raise ConfigError(f"a file must end in one of {', '.join(_FORMATS)}")
        return datasets.load_dataset(_FORMATS[path.suffix], data_files={config.split: str(path)}, split=config.split)
    except (StopIteration, IndexError) as error:  # what datasets raises where no file, or no folder, has a row
        raise _no_rows(config) from error
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ConfigError(f"{field}: cannot load {config.name or config.path}: {cause}") from error


def _no_rows(config: DatasetConfig) -> ConfigError:
    field = "name" if config.name is not None else "path"
    return ConfigError(f"dataset.{field}: {config.name or config.path} has no rows in split {config.split!r}")


def _split(dataset: Any, split: str) -> Any:
    if not isinstance(dataset, dict):
        return dataset
    if split not in dataset:
        raise ConfigError(f"no split {split!r} (dataset.split), there are {', '.join(dataset)}")
    return dataset[split]


def _reasoning_gym_source(
    config: DatasetConfig, gym: ReasoningGymDataset, tokenizer: Any, seed: int, images: ImagePrompts | None
) -> PromptSource:
    # It takes seconds, and jobs with other datasets do not need it.
    from reasoning_gym.factory import DATASETS, create_dataset

    if gym.dataset not in DATASETS:
        close = difflib.get_close_matches(gym.dataset, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ConfigError(
            f"dataset.reasoningGym.dataset: reasoning-gym has no {gym.dataset!r}; "
            f"did you mean one of {', '.join(close)}?"
        )
    known = {field.name for field in dataclasses.fields(DATASETS[gym.dataset][1])} - {"size"}
    if unknown := gym.params.keys() - known:
        raise ConfigError(
            f"dataset.reasoningGym.params: {gym.dataset} has no {', '.join(sorted(unknown))}; "
            f"it has {', '.join(sorted(known))} (the number of problems is dataset.reasoningGym.size)"
        )
    try:
        dataset = create_dataset(gym.dataset, **({"seed": seed} | gym.params), size=gym.size)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"dataset.reasoningGym.params: {gym.dataset} refuses them: {error}") from error

    return PromptSource(
        _Questions(dataset, config, is_chat=bool(tokenizer.chat_template)),
        PromptMaker(config, tokenizer, question_filled=True, images=images),
        seed=seed,
        shuffle=config.shuffle,
        preprocess=_preprocess(config),
        scorer=partial(_score, dataset),
    )


@dataclass(frozen=True, slots=True)
class _Questions:
    """Rows of a reasoning-gym dataset. `prompt` is the question in promptTemplate, as a message for chat models."""

    dataset: Any
    config: DatasetConfig
    is_chat: bool

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        entry = self.dataset[index]
        text = fill(self.config, entry["question"])
        prompt: Text = [{"role": "user", "content": text}] if self.is_chat else text
        return {**entry, "prompt": prompt}


def _score(dataset: Any, answer: str, prompt: Prompt) -> float:
    return float(dataset.score_answer(answer, prompt.columns))
