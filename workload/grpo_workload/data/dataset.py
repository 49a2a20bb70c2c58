"""Opens a job's dataset: of the hub, a file, a folder, a bucket, or problems that reasoning-gym generates."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import DatasetConfig, ReasoningGymDataset
from grpo_workload.algorithm.samples import Prompt, Text
from grpo_workload.data.bucket import fetch
from grpo_workload.data.images import ImagePrompts
from grpo_workload.data.overlong import PromptLimit
from grpo_workload.data.prompt_maker import Preprocess, PromptMaker, fill
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.data.tool_schemas import ToolSchemas

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
# Files that mark a folder as written by save_to_disk; any other folder is read as a folder of data files.
_SAVED = ("state.json", "dataset_dict.json")
_COMMIT = re.compile("[0-9a-f]{40}")


def load_prompts(
    config: DatasetConfig,
    tokenizer: Any,
    *,
    seed: int,
    limit: PromptLimit | None = None,
    images: ImagePrompts | None = None,
    tools: ToolSchemas | None = None,
) -> PromptSource:
    """Open the dataset, and prepare its first prompt as a check.

    `dataset.preprocess` changes rows first. A prompt that is a string is tokenized as it is. Messages go through the
    tokenizer's chat template with a generation prompt, and so do problems of reasoning-gym if the tokenizer has one.
    `images` puts those of rows into their messages, `tools` shows the model what it may call.

    Raises:
        ConfigError: the dataset cannot be found or read, is empty, lacks a `prompt` column, or does not fit preprocess,
            promptTemplate, systemPrompt or the tokenizer; the message names the field. Network errors are raised as
            they are: trying again may help.
    """
    maker = PromptMaker(config, tokenizer, images=images, tools=tools)
    if config.reasoning_gym is not None:
        source = _reasoning_gym_source(config, config.reasoning_gym, replace(maker, question_filled=True), seed)
    else:
        source = _hugging_face_source(config, maker, seed)
    source.has_images = source.make(source.draw(0, 0, 1)).images is not None
    source.limit = limit
    return source


def _hugging_face_source(config: DatasetConfig, maker: PromptMaker, seed: int) -> PromptSource:
    rows, preprocess = _open(config), _preprocess(config)
    if not len(rows):
        raise _no_rows(config)
    if preprocess is None and "prompt" not in rows.column_names:
        raise ConfigError(
            f"dataset: {config.source} has no column `prompt` (text, or a list of messages); "
            f"its columns are {', '.join(rows.column_names)}. Rename the one that holds the prompt, "
            "or build the prompt in dataset.preprocess"
        )
    return PromptSource(rows, maker, seed=seed, shuffle=config.shuffle, preprocess=preprocess)


def _preprocess(config: DatasetConfig) -> Preprocess | None:
    return None if config.preprocess is None else Preprocess(config.preprocess)


def _open(config: DatasetConfig) -> Any:
    import datasets  # It takes seconds, and jobs with reasoning-gym do not need it.

    try:
        if config.name is not None:
            builder = _of_hub(config)
            builder.download_and_prepare()
            return builder.as_dataset(split=config.split)
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
        raise ConfigError(f"{config.field}: cannot load {config.source}: {cause}") from error


def find_commit(config: DatasetConfig) -> str:
    """Return the commit of a dataset of the hub that `revision` points to, or the main branch; offline, the cached one.

    Raises:
        ConfigError: neither the hub nor its cache has it; names the field.
        ConnectionError: trying again may help.
    """
    import datasets

    try:
        return str(_of_hub(config).hash)
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"dataset.name: cannot load {config.name}: {error}") from error
    except OSError as error:  # those of the hub's client do not pickle
        raise ConnectionError(f"dataset.name: cannot find the commit of {config.name}: {error}") from error


def _of_hub(config: DatasetConfig) -> Any:
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    is_commit = config.revision is not None and _COMMIT.fullmatch(config.revision)
    if is_commit and (cached := _cached(config, config.config or "default")):
        return cached
    builder = datasets.load_dataset_builder(config.name, config.config, revision=config.revision)
    if not isinstance(builder, Cache) or config.revision is None:
        return builder
    # The hub does not answer, so `datasets` takes the newest commit in the cache, whatever was asked for.
    if is_commit:
        if cached := _cached(config, builder.config.name):
            return cached
        raise ConnectionError(
            f"dataset.name: the hub does not give {config.name} at commit {config.revision}, and the cache has "
            f"{builder.hash}"
        )
    if _num_cached(builder) > 1:
        raise ConnectionError(
            f"dataset.revision: the hub does not say which commit of {config.name} is {config.revision}, and the cache "
            "has several; set the commit itself"
        )
    return builder


def _cached(config: DatasetConfig, config_name: str) -> Any:
    """Return the builder of a commit that is in the cache, without a request to the hub; None if it is not there."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    *namespace, name = config.source.split("/")
    folder = "___".join([*namespace, datasets.naming.camelcase_to_snakecase(name)])
    below = Path(datasets.config.HF_DATASETS_CACHE) / folder / config_name
    for path in below.glob(f"*/{config.revision}"):
        version, commit = path.parts[-2:]
        return Cache(repo_id=config.name, dataset_name=name, config_name=below.name, version=version, hash=commit)
    return None


def _num_cached(builder: Any) -> int:
    """Return how many commits of a dataset the cache has, from the builder of one."""
    return sum(path.is_dir() for path in Path(builder.cache_dir).parent.parent.glob("*/*"))


def _no_rows(config: DatasetConfig) -> ConfigError:
    return ConfigError(f"{config.field}: {config.source} has no rows in split {config.split!r}")


def _split(dataset: Any, split: str) -> Any:
    if not isinstance(dataset, dict):
        return dataset
    if split not in dataset:
        raise ConfigError(f"no split {split!r} (dataset.split), there are {', '.join(dataset)}")
    return dataset[split]


def _reasoning_gym_source(
    config: DatasetConfig, gym: ReasoningGymDataset, maker: PromptMaker, seed: int
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
        Questions(dataset, config, is_chat=bool(maker.tokenizer.chat_template)),
        maker,
        seed=seed,
        shuffle=config.shuffle,
        preprocess=_preprocess(config),
        scorer=partial(_score, dataset),
    )


@dataclass(frozen=True, slots=True)
class Questions:
    """Rows of a reasoning-gym dataset. `prompt` is the question in promptTemplate, as a message for chat models."""

    dataset: Any
    config: DatasetConfig
    is_chat: bool

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def recipe(self) -> str:
        """The causes of the problems: the code that generates them, its parameters, and the seed.

        The problems themselves may take seconds each, and some datasets make others in each process.
        """
        code, gym = inspect.getsource(sys.modules[type(self.dataset).__module__]), self.config.reasoning_gym
        assert gym is not None
        # By name: a field that a later release adds changes nothing for a run that began before.
        return json.dumps([gym.dataset, gym.params, gym.size, self.dataset.seed, code], sort_keys=True)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        entry = self.dataset[index]
        text = fill(self.config, entry["question"])
        prompt: Text = [{"role": "user", "content": text}] if self.is_chat else text
        return {**entry, "prompt": prompt}


def _score(dataset: Any, answer: str, prompt: Prompt) -> float:
    return float(dataset.score_answer(answer, prompt.columns))
