"""Larger random models for tests on GPUs, and the difference between an engine and such a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_workload.algorithm.samples import Prompt
from support.trainer.engines import differences
from support.trainer.tiny_model import make_tiny_tokenizer


def make_random_llama(folder: Path, device: str, *, hidden: int, layers: int, heads: int) -> Any:
    """Return a random Llama in bfloat16 on `device`; it is saved in `folder`, which is its name.

    Its embeddings are tied, and it has half as many key and value heads as `heads`.
    """
    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


def mean_difference(model: Any, generator: Any, prompts: Sequence[Prompt], num_generations: int) -> float:
    """Return the mean absolute difference of sampled tokens' log-probabilities between the engine and the model."""
    return float(differences(model, prompts, generator.generate(prompts, num_generations)).mean())
