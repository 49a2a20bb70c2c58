"""Loads the model's tokenizer."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from grpo_workload.spec.errors import ConfigError
from grpo_workload.spec.inputs import ModelConfig


def load_tokenizer(model: ModelConfig) -> Any:
    """Return the model's tokenizer, with a pad token. Raises ConfigError if it cannot be loaded."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.source, revision=model.revision or "main")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model.field}: cannot load the tokenizer of {model.source}: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    return tokenizer
