"""Ranks share the sequences of models whose attention alone sees other tokens, and of others the field says why not."""

import re

import pytest
from transformers import AutoConfig

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import VISION_FAMILIES
from grpo_workload.policy.model.sequence_check import check_sequence
from grpo_workload.ranks.sequence_group import check_size
from support.families import make_config


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_heads_of_any_number_are_divided(family):
    for size in (2, 3, 4):
        check_sequence(make_config(family), "varlen", size)


@pytest.mark.parametrize(
    ("family", "attention", "size", "why"),
    [
        ("llama", "eager", 2, "model.attention eager sees the tokens of one rank alone (varlen would work)"),
        ("llama", "varlen", 5, "llama has 4 attention heads, and each rank needs one"),
        ("qwen3_5_text", "varlen", 2, "layers of the types linear_attention carry a state from one rank's tokens to"),
        ("qwen2_5_vl", "varlen", 2, "qwen2_5_vl is trained with images, whose tokens cannot be divided"),
    ],
)
def test_what_stands_in_the_way_is_named(family, attention, size, why):
    config = AutoConfig.for_model(family) if family in VISION_FAMILIES else make_config(family)
    said = re.escape(f"parallelism.sequence: {size} ranks cannot share sequences: {why}")
    with pytest.raises(ConfigError, match=said):
        check_sequence(config, attention, size)


def test_a_size_that_divides_the_ranks_is_proposed():
    check_size(3, 9)
    with pytest.raises(ConfigError, match=r"parallelism.sequence: 4 does not divide the 6 ranks that train; 3 would"):
        check_size(4, 6)
