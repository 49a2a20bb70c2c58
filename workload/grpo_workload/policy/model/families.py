"""Families of models (`model_type`) that were compared with transformers and vLLM: the rows of docs/models.md."""

from __future__ import annotations

from grpo_spec.inputs import VISION_FAMILIES

ALL, ZERO3, ADAPTERS = "all weights", "ZeRO-3", "LoRA"

TESTED: dict[str, tuple[str, ...]] = (
    dict.fromkeys(
        (
            *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"),
            *("gemma3_text", "gpt_oss", "phi3", "olmo2", "olmo3", "smollm3", "glm4", "glm4_moe", "glm4_moe_lite"),
            *(
                "granite",
                "granitemoe",
                "granitemoehybrid",
                "falcon_h1",
                "deepseek_v3",
                "seed_oss",
                "cohere",
                "cohere2",
                "exaone4",
            ),
            *("ernie4_5", "hunyuan_v1_dense", "starcoder2", "apertus", "lfm2", "gemma3", "nemotron", "stablelm"),
            *("olmo", "gpt2", "gpt_neox", "arcee", "glm", "jais2", "hyperclovax", "minicpm3", "granitemoeshared"),
            *(
                "olmoe",
                "flex_olmo",
                "llama4_text",
                "dots1",
                "solar_open",
                "exaone_moe",
                "cohere2_moe",
                "deepseek_v2",
                "afmoe",
            ),
            *("hy_v3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2_moe", "ministral3", "ernie4_5_moe", "gemma4_text"),
            *("granite_swa", "granitemoe_swa", "mellum", "hunyuan_v1_moe", "qwen3_5_text", "qwen3_5_moe_text"),
            *("minimax_m2", "gemma3n_text", "jamba", "nemotron_h", "falcon_mamba"),
        ),
        (ALL, ZERO3, ADAPTERS),
    )
    | dict.fromkeys(VISION_FAMILIES, (ALL,))
    | dict.fromkeys(("phimoe", "olmo_hybrid", "kimi_linear", "deepseek_v32", "glm_moe_dsa"), ())
)
"""Families whose training computes what transformers does, each with the pushes after which vLLM did so, too."""
