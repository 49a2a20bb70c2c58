"""The reward `jsonSchema`: whether a completion is JSON that a JSON Schema accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from jsonschema import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from grpo_spec.errors import ConfigError
from grpo_spec.rewards import JsonSchemaConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.data.prompt_source import PromptSource
from grpo_workload.rewards.answer_in_text import compiled, last_answer
from grpo_workload.rewards.trl_signature import Values


class JsonSchemaReward:
    """Scores completions by one schema, or by that of each row."""

    def __init__(self, name: str, config: JsonSchemaConfig, source: PromptSource) -> None:
        """Read the schema, or that of the first row. ConfigError, naming the field, if it is none."""
        self._field, self._config = f"rewards[{name}].jsonSchema", config
        self._extract = None if config.extract is None else compiled(config.extract)
        self._inline = None if config.inline is None else json.dumps(config.inline)
        first = source.batch(0, 1)[0]
        if config.column is not None and config.column not in first.columns:
            found = ", ".join(first.columns) or "nothing but prompts"
            raise ConfigError(f"{self._field}.column: the dataset has no column {config.column}; it has {found}")
        self._validator(first)

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> Values:
        """Return 1 for what the schema accepts, else 0; None for a row without a schema."""
        return [self._score(prompt, one.text) for prompt, one in zip(prompts, completions, strict=True)]

    def _score(self, prompt: Prompt, text: str) -> float | None:
        if (validator := self._validator(prompt)) is None:
            return None
        if (answer := last_answer(self._extract, text)) is None:
            return 0.0
        try:
            return float(validator.is_valid(json.loads(answer, parse_constant=_refuse)))
        except (ValueError, RecursionError):  # no JSON, or nested deeper than Python can follow
            return 0.0
        except Unresolvable as error:
            raise ConfigError(f"{self._where(prompt)}: the schema refers to {error}, which is not in it") from error

    def _validator(self, prompt: Prompt) -> Any:
        if self._inline is not None:
            return self._made(self._inline, prompt)
        assert self._config.column is not None
        given = prompt.columns[self._config.column]
        if given is None:
            return None
        return self._made(given if isinstance(given, str) else json.dumps(given), prompt)

    def _made(self, text: str, prompt: Prompt) -> Any:
        try:
            return _validator(text)
        except (ValueError, SchemaError) as error:
            reason = error.message if isinstance(error, SchemaError) else error
            raise ConfigError(f"{self._where(prompt)}: this is no JSON Schema: {reason}") from error

    def _where(self, prompt: Prompt) -> str:
        return f"{self._field}.inline" if self._inline is not None else f"{self._field}.column: row {prompt.index}"


@lru_cache(maxsize=1024)
def _validator(text: str) -> Any:
    schema = json.loads(text)
    latest = Draft202012Validator
    kind = validator_for(schema, default=latest) if isinstance(schema, Mapping) else latest
    kind.check_schema(schema)
    return kind(schema, registry=Registry())  # an empty one: nothing is fetched from where a schema refers to


def _refuse(name: str) -> NoReturn:
    raise json.JSONDecodeError("no JSON", name, 0)
