"""The tools of a function or an object as JSON schemas: those that TRL collects, described as TRL describes them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from grpo_spec.errors import ConfigError

_OF_THE_TRAINER = ("reset", "get_reward")
_ADVICE = (
    "write a type hint for each argument, and a docstring that says what it does and, below `Args:`, has a line "
    "`name: what it is` for each argument"
)


def methods_of(instance: object) -> list[Callable[..., Any]]:
    """Return the public methods of an environment, but those that only the trainer calls."""
    # Of the class: on the instance this would evaluate properties.
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if name not in _OF_THE_TRAINER and not name.startswith("_")]


def has_method(instance: object, name: str) -> bool:
    """Whether the class of an environment has it."""
    return inspect.isfunction(inspect.getattr_static(type(instance), name, None))


def schemas_of(field: str, tools: Iterable[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools. ConfigError, naming `field`, if one has no hints or no docstring."""
    from transformers.utils import chat_template_utils  # takes a second

    # It would import torch, only to compare hints with torch.Tensor.
    has_torch = "torch" in sys.modules
    chat_template_utils.is_torch_available = lambda: has_torch
    found = []
    for tool in tools:
        try:
            found.append(chat_template_utils.get_json_schema(tool))
        except Exception as error:  # typing and json raise their own
            name = getattr(tool, "__qualname__", repr(tool))
            text = str(error) or type(error).__name__
            raise ConfigError(f"{field}: {name} cannot be described to a model: {text}; {_ADVICE}") from error
    return found
