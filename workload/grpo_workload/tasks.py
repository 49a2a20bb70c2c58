"""Prompts from a dataset: which ones at which step, as text and as token ids."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from grpo_workload.config import DatasetConfig, ReasoningGymDataset
from grpo_workload.seeds import prompt_seed
from grpo_workload.types import Prompt, Text

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
# What save_to_disk leaves behind; any other folder is read as a folder of data files.
_SAVED = ("state.json", "dataset_dict.json")

Scorer = Callable[[str, Prompt], float]


class PromptError(ValueError):
    """A prompt of the dataset cannot be used; the message names the row."""


class Rows(Protocol):
    """A dataset: rows by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class PromptSource:
    """The prompts of a dataset in a shuffled order that depends on the seed and the step alone, so a resumed run sees the same ones.

    Every epoch has an order of its own; a batch that reaches over its end goes on in the next, so no prompt is skipped.
    """

    def __init__(
        self, rows: Rows, to_prompt: Callable[[int, Mapping[str, Any]], Prompt], *, seed: int, scorer: Scorer | None = None
    ) -> None:
        """Prompts made of `rows` by `to_prompt(index, row)` when they are asked for; `scorer` is reasoning-gym's score of an answer."""
        self._rows = rows
        self._to_prompt = to_prompt
        self._seed = seed
        self.scorer = scorer

    def __len__(self) -> int:
        """Number of prompts in the dataset."""
        return len(self._rows)

    def batch(self, step: int, prompts_per_step: int) -> list[Prompt]:
        """The prompts of optimizer step `step` (from 0), over all ranks; rows are read and tokenized here, not before.

        PromptError for a row that is none.
        """
        start = step * prompts_per_step
        return [
            dataclasses.replace(self._prompt(start + position), seed=prompt_seed(self._seed, step, position))
            for position in range(prompts_per_step)
        ]

    def _prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self))
        index = int(_order(len(self), self._seed, epoch)[offset])
        return self._to_prompt(index, self._rows[index])


def load_prompts(config: DatasetConfig, tokenizer: Any, *, seed: int) -> PromptSource:
    """Open the dataset.

    A prompt that is a string is tokenized as it stands; messages, and problems of reasoning-gym when the tokenizer has a chat
    template, go through that template with a generation prompt. The first row is tried at once.

    Raises:
        ValueError: the dataset cannot be found or read, is empty, lacks a `prompt` column, or does not go with promptTemplate,
            systemPrompt or the tokenizer; names the field. Failures of the network come as they are: trying again may help.
    """
    if config.reasoning_gym is not None:
        source = _reasoning_gym_source(config, config.reasoning_gym, tokenizer, seed)
    else:
        source = _hugging_face_source(config, tokenizer, seed)
    if not len(source):
        raise ValueError(f"dataset: {config.name or config.path} has no rows in split {config.split!r}")
    source.batch(0, 1)
    return source


@lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def _hugging_face_source(config: DatasetConfig, tokenizer: Any, seed: int) -> PromptSource:
    rows = _open(config)
    if "prompt" not in rows.column_names:
        raise ValueError(
            f"dataset: {config.name or config.path} has no column `prompt` (text, or a list of messages); "
            f"its columns are {', '.join(rows.column_names)}. Rename the one that holds the prompt"
        )

    def to_prompt(index: int, row: Mapping[str, Any]) -> Prompt:
        columns = {name: value for name, value in row.items() if name != "prompt"}
        return _make_prompt(config, tokenizer, index, row["prompt"], columns)

    return PromptSource(rows, to_prompt, seed=seed)


def _open(config: DatasetConfig) -> Any:
    # Not at the top of the file: it takes seconds, and the operator's machine checks configurations too.
    import datasets

    field = "dataset.name" if config.name is not None else "dataset.path"
    try:
        if config.name is not None:
            return datasets.load_dataset(config.name, config.config, split=config.split)
        assert config.path is not None
        path = Path(config.path)
        if any((path / name).exists() for name in _SAVED):
            return _split(datasets.load_from_disk(str(path)), config.split)
        if path.is_dir():
            return datasets.load_dataset(str(path), split=config.split)
        if not path.exists():
            raise FileNotFoundError("there is no such file or folder in the container; is its volume mounted in every trainer pod?")
        if path.suffix not in _FORMATS:
            raise ValueError(f"a file must end in one of {', '.join(_FORMATS)}")
        return datasets.load_dataset(_FORMATS[path.suffix], data_files={config.split: str(path)}, split=config.split)
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ValueError(f"{field}: cannot load {config.name or config.path}: {cause}") from error


def _split(dataset: Any, split: str) -> Any:
    if not isinstance(dataset, dict):
        return dataset
    if split not in dataset:
        raise ValueError(f"no split {split!r} (dataset.split), there are {', '.join(dataset)}")
    return dataset[split]


def _reasoning_gym_source(config: DatasetConfig, gym: ReasoningGymDataset, tokenizer: Any, seed: int) -> PromptSource:
    # Hundreds of generators: importing takes seconds.
    from reasoning_gym.factory import DATASETS, create_dataset

    if gym.dataset not in DATASETS:
        close = difflib.get_close_matches(gym.dataset, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ValueError(f"dataset.reasoningGym.dataset: reasoning-gym has no {gym.dataset!r}; did you mean one of {', '.join(close)}?")
    known = {field.name for field in dataclasses.fields(DATASETS[gym.dataset][1])} - {"size"}
    if unknown := gym.params.keys() - known:
        raise ValueError(
            f"dataset.reasoningGym.params: {gym.dataset} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))} "
            "(the number of problems is dataset.reasoningGym.size)"
        )
    try:
        dataset = create_dataset(gym.dataset, **({"seed": seed} | gym.params), size=gym.size)
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"dataset.reasoningGym.params: {gym.dataset} refuses them: {error}") from error

    filled = config.model_copy(update={"prompt_template": None})  # it goes around the question, here, also in chat form

    def to_prompt(index: int, entry: Mapping[str, Any]) -> Prompt:
        text = _fill(config, entry["question"])
        prompt: Text = [{"role": "user", "content": text}] if tokenizer.chat_template else text
        return _make_prompt(filled, tokenizer, index, prompt, dict(entry))

    return PromptSource(dataset, to_prompt, seed=seed, scorer=lambda answer, prompt: float(dataset.score_answer(answer, prompt.columns)))


def _fill(config: DatasetConfig, text: str) -> str:
    return text if config.prompt_template is None else config.prompt_template.replace("{prompt}", text)


def _make_prompt(config: DatasetConfig, tokenizer: Any, index: int, prompt: Any, columns: dict[str, Any]) -> Prompt:
    if isinstance(prompt, str):
        if config.system_prompt is not None:
            raise ValueError("dataset.systemPrompt: prompts are plain text, not messages; put it into dataset.promptTemplate")
        text = _fill(config, prompt)
        if not (token_ids := tokenizer(text)["input_ids"]):
            raise PromptError(f"dataset: `prompt` of row {index} is empty, and a model cannot go on from nothing; remove the row")
        return Prompt(index=index, text=text, token_ids=tuple(token_ids), columns=columns)
    if not _is_messages(prompt):
        raise PromptError(f"dataset: `prompt` of row {index} must be text or a list of messages with role and text content")
    if config.prompt_template is not None:
        raise ValueError("dataset.promptTemplate: prompts are messages, not plain text; use dataset.systemPrompt")
    if not tokenizer.chat_template:
        raise ValueError("dataset: prompts are messages, but the model's tokenizer has no chat template; use a chat model or plain text")
    # Arrow gives every message all keys that any message has.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return Prompt(index=index, text=messages, token_ids=tuple(token_ids), columns=columns)


def _is_messages(prompt: Any) -> bool:
    def is_message(message: Any) -> bool:
        return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)

    return isinstance(prompt, list) and bool(prompt) and all(is_message(message) for message in prompt)
