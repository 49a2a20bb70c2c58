"""Rewards that are built in, but for the judge: functions of completions and of the dataset's columns."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_spec.rewards import ExactMatchConfig, FormatConfig, RewardConfig, SoftOverlongConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.rewards.answer_in_text import compiled, last_answer
from grpo_workload.rewards.math_answers import Accuracy
from grpo_workload.rewards.references import COLUMNS
from grpo_workload.rewards.scorer import RewardFunction
from grpo_workload.rewards.trl_signature import Values


def builtin(config: RewardConfig, source: PromptSource) -> RewardFunction:
    """Return the function of a built-in reward. ConfigError, naming the field, if it does not fit the dataset."""
    if config.exact_match is not None:
        return _exact_match(config.name, config.exact_match, source)
    if config.format is not None:
        return _format(config.format)
    if config.json_schema is not None:
        from grpo_workload.rewards.json_schema import JsonSchemaReward  # imports jsonschema, which takes seconds

        return JsonSchemaReward(config.name, config.json_schema, source)
    if config.soft_overlong is not None:
        return _soft_overlong(config.soft_overlong)
    if config.reasoning_gym is not None:
        return _reasoning_gym(config.name, source)
    if config.environment is not None:
        return lambda prompts, completions: [one.episode.reward if one.episode else None for one in completions]
    assert config.stopped is not None
    return lambda prompts, completions: [float(completion.finish_reason == "stop") for completion in completions]


def accuracy(config: RewardConfig, source: PromptSource) -> Accuracy:
    """Return the reward `accuracy`. ConfigError if the dataset has no answers."""
    columns = source.batch(0, 1)[0].columns
    if not any(column in columns for column in COLUMNS):
        found = ", ".join(columns) or "nothing but prompts"
        raise ConfigError(
            f"rewards[{config.name}].accuracy needs a column `solution` or `answer`; the dataset has {found}"
        )
    return Accuracy(config)


def _exact_match(name: str, config: ExactMatchConfig, source: PromptSource) -> RewardFunction:
    field = f"rewards[{name}].exactMatch"
    columns = source.batch(0, 1)[0].columns
    if config.column not in columns:
        found = ", ".join(columns) or "nothing but prompts"
        raise ConfigError(f"{field}.column: the dataset has no column {config.column}; it has {found}")
    extract = None if config.extract is None else compiled(config.extract)

    def matches(gold: Any, text: str) -> float | None:
        accepted = [gold] if isinstance(gold, str) or not isinstance(gold, Sequence) else gold
        if gold is None or not accepted:
            return None
        given = last_answer(extract, text)
        return float(given is not None and _normal(given) in {_normal(str(one)) for one in accepted})

    return lambda prompts, completions: [
        matches(prompt.columns[config.column], completion.text)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".").rstrip()


def _format(config: FormatConfig) -> RewardFunction:
    opening = None
    if config.tags is None:
        assert config.pattern is not None
        whole = compiled(config.pattern)
    else:
        opening = f"<{config.tags[0]}>"
        inside = f"(?:(?!</?(?:{'|'.join(map(re.escape, config.tags))})>).)*"
        parts = (f"<{re.escape(tag)}>{inside}</{re.escape(tag)}>" for tag in config.tags)
        whole = re.compile(r"\s*".join(parts), re.DOTALL)

    def has_format(prompt: Prompt, text: str) -> float:
        # Chat templates of models that always reason write the first tag themselves.
        begun = opening if opening and prompt.ending.rstrip().endswith(opening) else ""
        return float(whole.fullmatch(begun + text.strip()) is not None)

    return lambda prompts, completions: [
        has_format(prompt, completion.text) for prompt, completion in zip(prompts, completions, strict=True)
    ]


def _soft_overlong(config: SoftOverlongConfig) -> RewardFunction:
    def punishment(length: int) -> float:
        room = config.max_length - config.cache_length - length
        return min(0.0, max(-1.0, room / config.cache_length))

    return lambda prompts, completions: [punishment(completion.filled) for completion in completions]


def _reasoning_gym(name: str, source: PromptSource) -> RewardFunction:
    scorer = source.scorer
    if scorer is None:
        raise ConfigError(
            f"rewards[{name}].reasoningGym: the dataset is not a reasoning-gym dataset (dataset.reasoningGym); use "
            "accuracy"
        )

    def reasoning_gym(prompts: list[Prompt], completions: list[Completion]) -> Values:
        return [
            scorer(completion.text.strip(), prompt) for prompt, completion in zip(prompts, completions, strict=True)
        ]

    return reasoning_gym
