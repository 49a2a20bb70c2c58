"""Tokens that end a completion of engine Transformers; a model without one is named."""

import pytest
from transformers import GenerationConfig

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import ModelConfig
from grpo_workload.generation.plain_generate import eos_ids
from support.trainer.tiny_model import make_tiny_tokenizer

MODEL = ModelConfig(path="/models/base")


def test_tokens_that_end_a_text_are_the_tokenizers_and_the_models():
    tokenizer = make_tiny_tokenizer()
    assert eos_ids(MODEL, GenerationConfig(), tokenizer) == {tokenizer.eos_token_id}
    assert eos_ids(MODEL, GenerationConfig(eos_token_id=[5, 6]), tokenizer) == {tokenizer.eos_token_id, 5, 6}
    tokenizer.eos_token = None
    assert eos_ids(MODEL, GenerationConfig(eos_token_id=5), tokenizer) == {5}
    with pytest.raises(ConfigError, match=r"model.path: neither the tokenizer of /models/base nor .* set eos_token in"):
        eos_ids(MODEL, GenerationConfig(), tokenizer)
