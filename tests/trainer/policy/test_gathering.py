"""Weights that ZeRO-3 keeps in parts are exported whole, with the values of the last step, and stay in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_spec.contract import Device

LAYERS = 12


def test_gathered_weights_equal_the_trained_ones(run_program: Callable[..., list[Any]]) -> None:
    """Each of 3 ranks takes 3 steps, and exports all weights 10 times after each step."""
    weights = [f"{layer}.weight" for layer in range(LAYERS)]
    for result in run_program("gathering.py", 3, Device.CPU):
        assert len(result["steps"]) == 3
        for step in result["steps"]:
            assert step["partitioned"] == weights, "after exports the ranks hold parts of the weights, and whole biases"
            assert step["wrong"] == [], "exported values are those that DeepSpeed gathers"
            assert step["exported"] == result["specs"], "names, types and shapes are those announced"
            assert step["untrained"] == [], "each step changes every parameter"
