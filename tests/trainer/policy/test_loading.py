"""Rank 0 alone reads a model, under every ZeRO stage; each rank then has what transformers would have loaded."""

import torch

from support.families import PARTS, make_model

EQUAL = {"whole": [], "parts": [], "partitioned": True, "is_ahead": False}
FAMILIES = (
    "llama",
    "qwen2",  # biases
    "gemma3_text",  # tied
    "phi3",  # joined projections
    "mixtral",  # other names, and experts that are stacked
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",  # a buffer of checkpoints
    "ernie4_5_moe",  # weights that stay in float32, and such of its own shape
    "qwen3_next",
    "falcon_mamba",
    "gemma3",  # a vision tower
)


def test_all_ranks_have_what_rank_0_reads(run_program, tmp_path):
    """Other ranks have files of zeros, so no value is theirs; weights are float32 there, and bfloat16 where they go."""
    for family in FAMILIES:
        model = make_model(family, whole=family in PARTS)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if "e_score" in name:
                    buffer.normal_()
            model.save_pretrained(tmp_path / "models" / family / "read")
            for tensor in model.state_dict().values():
                tensor.zero_()
            model.save_pretrained(tmp_path / "models" / family / "zeros")
    for rank, result in enumerate(run_program("loading.py", 2, tmp_path / "models")):
        assert result["llama"].pop("lacking") == [rank > 0], "rank 0 has what is to go into 4 bits in host memory"
        assert result["llama"].pop("4 bits") == []
        assert result == dict.fromkeys(FAMILIES, EQUAL)
