"""Random models of the shapes that people train: their weights do not matter to a benchmark, their bytes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES = {  # hidden size, intermediate size, layers, heads, key/value heads: Qwen2.5's
    "tiny": (64, 128, 2, 2, 2),
    "0.1": (512, 2048, 12, 8, 4),
    "1.5": (1536, 8960, 28, 12, 2),
    "7": (3584, 18944, 28, 28, 4),
}
VOCABULARY = 151_936


def make_model(folder: Path, size: str, device: str, *, config_class: Any = None, max_length: int = 2048) -> Path:
    """Write a random model of `size`, in bfloat16, with the tiny byte tokenizer: a Llama unless `config_class` says otherwise."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from grpo_workload.tiny import make_tiny_tokenizer

    hidden, intermediate, layers, heads, kv_heads = SHAPES[size]
    tokenizer = make_tiny_tokenizer()
    config = (config_class or LlamaConfig)(
        vocab_size=VOCABULARY if size != "tiny" else 512,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=size != "7",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(before)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
