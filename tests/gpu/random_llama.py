"""Random models of some size for tests on GPUs, and how far an engine is from one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engines import own_logprobs
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_workload.tiny import make_tiny_tokenizer
from grpo_workload.types import Prompt


def make_random_llama(folder: Path, device: str, *, hidden: int, layers: int, heads: int) -> Any:
    """A random Llama in bfloat16 on `device`, tied, with two heads for each of keys and values; saved in `folder`, which is its name."""
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
    """Of log-probs of sampled tokens, between the engine and the module, over all tokens."""
    differences = [
        (own_logprobs(model, prompt, one) - torch.tensor(one.logprobs)).abs()
        for prompt, group in zip(prompts, generator.generate(prompts, num_generations), strict=True)
        for one in group
    ]
    return float(torch.cat(differences).mean())
