"""Sizes of tiny models beside those of tests/support/families.py: what kernels of engines need."""

from __future__ import annotations

from typing import Any

# Kernels of a GPU want heads of 64 and more.
SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 256}
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
LATENT |= {"num_key_value_heads": SIZES["num_attention_heads"]}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64}
ON_A_GPU: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 8},  # kernels of a GPU want weights that begin at multiples of 16 bytes
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS,
    "qwen3_next": EXPERTS | DELTA,
    "qwen3_5": DELTA,
    "qwen3_5_moe": EXPERTS | DELTA,
    "qwen3_5_text": DELTA,
    "glm4_moe_lite": EXPERTS | LATENT,
    "deepseek_v3": EXPERTS | LATENT,
    "deepseek_v32": EXPERTS | LATENT,
    "lfm2": {"block_dim": 512, "conv_dim": 512},
    "granitemoehybrid": MAMBA,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 1024},
    **dict.fromkeys(("dots1", "solar_open", "mellum", "exaone_moe", "ernie4_5_moe", "afmoe", "lfm2_moe"), EXPERTS),
    "hy_v3": EXPERTS | {"expert_hidden_dim": 256},
    "gemma3n_text": {"intermediate_size": [512] * 4},
    "gpt2": {"n_inner": 512},
    "gpt_neox": {"num_key_value_heads": SIZES["num_attention_heads"]},
    "minicpm3": LATENT,
    "deepseek_v2": EXPERTS | LATENT,
    "glm_moe_dsa": EXPERTS | LATENT | {"index_head_dim": 128},
    "qwen3_5_moe_text": EXPERTS | DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": EXPERTS | LATENT | {"linear_head_dim": 128},
}
# Than the program's sequences: vLLM's windows of Cohere hold one token more than transformers'; its chunks are blocks.
LONGER: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 512},
    "cohere2_moe": {"sliding_window": 512},
    "llama4_text": {"attention_chunk_size": 512},
}
GATED_DELTA_NET = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
)
