"""Asserts that models whose layers cannot be split evenly are refused, with a number of GPUs that would work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.inputs import ModelConfig
from grpo_workload.pod.model_split import check_split, read_model_config, split_sizes, takes_text_alone


def heads(number: int, **others: int) -> dict[str, object]:
    return {"num_attention_heads": number} | others


@pytest.mark.parametrize(
    ("size", "model", "message"),
    [
        (2, heads(9, num_key_value_heads=3), "9 attention heads and 3 key and value heads .* 2 GPUs; 1 would"),
        (8, heads(12), "12 attention heads cannot be split evenly over 8 GPUs; 4 would work"),
        (6, heads(12, num_key_value_heads=4), "12 attention heads and 4 key and value heads .* 6 GPUs; 2 would work"),
        (4, {"text_config": heads(14)}, "14 attention heads .* 4 GPUs; 2 would work"),
        (8, heads(8, intermediate_size=100), "intermediate_size of 100 cannot .* 8 GPUs; 4 would"),
        (6, heads(6, vocab_size=32000), "vocabulary of 32000 tokens cannot .* 6 GPUs; 2 would"),
    ],
)
def test_layers_that_cannot_be_split_evenly_are_refused(size: int, model: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^generation.tensorParallel: the model's {message}"):
        check_split("generation.tensorParallel", size, model)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_fewer_key_and_value_heads_than_gpus_are_accepted(size: int) -> None:
    check_split("f", size, {"num_attention_heads": 32, "num_key_value_heads": 4})


def test_what_a_configuration_does_not_say_is_accepted() -> None:
    check_split("f", 7, {})
    check_split("f", 3, {"num_attention_heads": 6, "intermediate_size": 100, "num_experts": 8})  # experts may have it


def test_all_sizes_that_work_are_named() -> None:
    qwen = {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936}
    assert split_sizes(qwen, 64) == [1, 2]
    assert split_sizes({"num_attention_heads": 12, "num_key_value_heads": 4}, 16) == [1, 2, 4, 12]


@given(st.integers(1, 64), st.integers(1, 128), st.integers(1, 128))
def test_the_number_that_a_refusal_suggests_is_accepted(size: int, heads: int, key_values: int) -> None:
    model = {"num_attention_heads": heads, "num_key_value_heads": key_values}
    try:
        check_split("f", size, model)
    except ValueError as error:
        better = int(str(error).split("; ")[1].split()[0])
        assert size % better == 0
        check_split("f", better, model)


def test_the_models_configuration_is_read_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_model_config(ModelConfig(path=str(tmp_path))) == {}
    assert read_model_config(ModelConfig(name="org/no-such-model-anywhere")) == {}
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9}))
    assert read_model_config(ModelConfig(path=str(tmp_path))) == {"num_attention_heads": 9}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3_5", "vision_config": {}}, True),
        ({"model_type": "qwen3_vl", "vision_config": {}}, False),
        ({"model_type": "llama"}, False),
    ],
)
def test_engines_leave_out_a_tower_that_is_not_trained(config: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert takes_text_alone(ModelConfig(path=str(tmp_path))) is expected
