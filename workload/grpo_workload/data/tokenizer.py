"""Loads the model's tokenizer."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from grpo_spec.inputs import ModelConfig
from grpo_workload.data.model_errors import explained


def load_tokenizer(model: ModelConfig) -> Any:
    """Return the model's tokenizer, with a pad token. Raises ConfigError if it cannot be loaded."""
    with explained(model, "load the tokenizer of"):
        tokenizer = AutoTokenizer.from_pretrained(model.source, revision=model.revision or "main")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    return tokenizer
