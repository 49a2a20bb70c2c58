"""Tiny models of families that transformers loads in different ways, with random weights, made in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SIZES = {"hidden_size": 128, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 256}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1} | _EXPERTS
_RANKS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
_LATENT = _GROUPS | _RANKS | {"num_key_value_heads": 4}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
_SHARED_FEW = _FEW | {"logits_scaling": 4.0, "shared_intermediate_size": 32}
_PER_LAYER = {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 32}
# Of more positions than the tests have: vLLM does not scale queries beyond the original ones.
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
_YARN |= {"original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0}
_WINDOW = {"sliding_window": 8}
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": _WINDOW,
    "mixtral": _FEW,  # other names, and experts stacked
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32} | _EXPERTS,
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4} | _EXPERTS,  # experts stacked
    "gemma": {},
    # Caps as small as the scores of a tiny model.
    "gemma2": _MIXED | {"query_pre_attn_scalar": 48, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0},
    "gemma3_text": _MIXED,  # tied
    "gpt_oss": _WINDOW | _FEW | {"intermediate_size": 128},
    "phi3": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "smollm3": {},
    "glm4": {},
    "glm4_moe": _GROUPS,
    "glm4_moe_lite": _LATENT,
    # Large factors, as published models have.
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.3},
    "granitemoe": _FEW | {"logits_scaling": 4.0},  # experts stacked, in checkpoints too
    "deepseek_v3": _LATENT
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # experts stacked in one layer of two, and a buffer
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
    "cohere": {"logit_scale": 0.25},
    "cohere2": _MIXED | {"logit_scale": 0.25},
    "exaone4": _MIXED,
    "ernie4_5": {},
    "hunyuan_v1_dense": {"use_qk_norm": True},  # as published models; vLLM reads the norms only then
    "starcoder2": {"residual_dropout": 0.1},
    "apertus": {},
    "minimax_m2": _FEW | {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "gemma3": _MIXED,
    "gemma4_text": _MIXED | _PER_LAYER | {"final_logit_softcapping": 1.0},
    "gemma3n_text": _WINDOW
    | _PER_LAYER
    | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    | {"laurel_rank": 8, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "intermediate_size": [96] * 4}
    | {"final_logit_softcapping": 1.0},
    "ministral3": {"rope_parameters": _YARN, "max_position_embeddings": 2048},
    "nemotron": {},  # layers that do not pass the bounds of sequences on
    "stablelm": {},
    "olmo": {"clip_qkv": 8.0},
    "gpt2": {"n_positions": 256, "n_inner": 96},
    "gpt_neox": {"num_key_value_heads": 4},
    "arcee": {},
    "glm": {},
    "jais2": {},
    "hyperclovax": {"use_post_norm": True, "attention_multiplier": 0.3, "logits_scaling": 0.5},  # multiplied
    "minicpm3": _RANKS | {"num_key_value_heads": 4},  # hidden states are scaled, not logits
    "granite_swa": _MIXED | {"logits_scaling": 4.0, "attention_multiplier": 0.3},
    "granitemoeshared": _SHARED_FEW,
    "granitemoe_swa": _MIXED | _SHARED_FEW,
    "olmoe": _FOUR,
    "flex_olmo": _FOUR,
    "phimoe": _FEW,  # routers that sample in training
    "dots1": _GROUPS | {"n_shared_experts": 1},
    "solar_open": _EXPERTS | {"n_routed_experts": 4},
    "mellum": _MIXED | _EXPERTS | {"num_local_experts": 4, "mlp_layer_types": ["sparse", "sparse"]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "exaone_moe": _MIXED | _EXPERTS | _SPARSE | {"num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
    | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "cohere2_moe": _MIXED | _SPARSE | _FOUR | {"num_shared_experts": 1, "logit_scale": 0.25},
    "deepseek_v2": _LATENT | {"n_shared_experts": 1},
    # vLLM reads fields of published configurations that transformers does not have.
    "afmoe": _MIXED
    | _EXPERTS
    | {"num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 2.0, "mup_enabled": True}
    | {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "hy_v3": _EXPERTS
    | _SPARSE
    | {"num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1, "expert_hidden_dim": 32}
    | {"route_norm": True, "qk_norm": True},
}
"""Fields of each family's configuration besides `SIZES`: families whose sequences can be packed into micro-batches."""

_SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 32} | _EXPERTS
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,  # vLLM's kernels take no less
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}

STATEFUL: dict[str, dict[str, Any]] = {
    "qwen3_next": _LINEAR | _SHARED,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR | _SHARED,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR | _SHARED,
    "olmo_hybrid": _LINEAR | {"linear_num_value_heads": 2},
    "kimi_linear": _RANKS
    | _SPARSE
    | {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32}
    | {"q_lora_rank": None, "linear_head_dim": 64, "linear_num_heads": 4, "model_max_length": 256}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": _EXPERTS | {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "falcon_mamba": {},
    "jamba": _FOUR | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2": {"block_dim": 128, "conv_dim": 128, "layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": _MAMBA | _FEW | {"layer_types": ["mamba", "attention"], "logits_scaling": 4.0},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 256},
    "nemotron_h": {},
}
"""Families whose layers carry a state along the sequence, so that a micro-batch may hold one alone."""

_INDEXED = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8, "indexer_types": ["full", "full"]}
_INDEXED |= {"layer_types": ["indexed_attention"] * 2}

MASKED: dict[str, dict[str, Any]] = {
    "llama4_text": _FEW
    | {"num_experts_per_tok": 1, "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]},
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT | _SPARSE | _INDEXED,
}
"""Families of which only the mask tells what is attended to: also one sequence alone, and eager attention."""


_TOWER = {"depth": 1, "num_heads": 2, "hidden_size": 64, "intermediate_size": 64, "num_position_embeddings": 64}
_SIGLIP = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 64}
_SIGLIP |= {"image_size": 28, "patch_size": 14}
_TOKENS = {"mm_tokens_per_image": 4, "image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5}

PARTS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"vision_config": _TOWER},
    "qwen3_5_moe": {"vision_config": _TOWER},
    "gemma3": {"vision_config": _SIGLIP} | _TOKENS,
}
"""Families whose checkpoints are of vision-language models, of which the text part is trained, and the other parts."""

SHORT = 48
"""Tokens up to which `LONG_ROPE` has factors for short sequences."""
LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + pair for pair in range(16)],
        "original_max_position_embeddings": SHORT,
    },
    "original_max_position_embeddings": SHORT,  # where Phi's configuration has it
}
"""RoPE whose factors depend on the length, as Phi-4-mini has it."""


def make_config(family: str, **fields: Any) -> Any:
    """Return the configuration of a family's model; `fields` replace those of the text."""
    text = SIZES | (FAMILIES | STATEFUL | MASKED)[family] | fields
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = text["vocab_size"]
    if family in PARTS:
        return AutoConfig.for_model(family, text_config=text, **PARTS[family])
    return AutoConfig.for_model(family, **text)


def make_model(family: str, *, whole: bool = False, **fields: Any) -> Any:
    """Return a model in float32, with the same weights at each call; `whole`: as checkpoints have it, not the text."""
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if whole and family in PARTS else AutoModelForCausalLM
    model: Any = kind.from_config(make_config(family, **fields), dtype=torch.float32)
    with torch.no_grad():  # from_config leaves some at 0, such as biases: a wrong one would not show
        for tensor in [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]:
            if not tensor.any():
                tensor.normal_(std=0.02)
    return model


def make_routed_model(family: str, *, ties: bool = False, **fields: Any) -> Any:
    """Return a mixture of experts in which the choice of experts matters; with `ties`, rounding decides it."""
    model = make_model(family, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter *= 10
            elif ties and ".gate." in name:
                parameter *= 1e-6
    return model
