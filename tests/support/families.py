"""Tiny models of families that transformers loads in different ways, with random weights, made in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1} | _EXPERTS
_RANKS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {},  # tied
    "olmo2": {},
    "smollm3": {},
    "hunyuan_v1_dense": {"use_qk_norm": True},  # as published models; vLLM reads the norms only then
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # other names, and experts stacked
    "qwen3_moe": {"num_experts": 4} | _EXPERTS,  # experts stacked
    "deepseek_v3": _GROUPS
    | _RANKS
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # experts stacked in one layer of two, and a buffer
    "glm4_moe": _GROUPS,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # experts stacked, in checkpoints too
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
}
"""What each family's configuration has besides `SIZES`."""


def make_model(family: str, **fields: Any) -> Any:
    """Return a model in float32, with the same weights at each call."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SIZES | FAMILIES[family] | fields), dtype=torch.float32
    )
    with torch.no_grad():  # from_config leaves some at 0, such as biases: a wrong one would not show
        for tensor in [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]:
            if not tensor.any():
                tensor.normal_(std=0.02)
    return model
