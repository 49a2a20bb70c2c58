"""Assertions on what several tests' programs report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def assert_error(error: Sequence[str] | None, kind: str, pattern: str) -> None:
    """Assert that `error`, from a program's `error_of`, is of type `kind` with a message that contains `pattern`."""
    assert error is not None, f"no {kind} was raised"
    name, message = error
    assert name == kind, f"{name}: {message}"
    assert re.search(pattern, message), f"{pattern!r} does not match {message!r}"


def assert_gathered(result: dict[str, Any]) -> None:
    """Assert that `gathering.py` has exported the 12 layers that were trained, on each of its steps."""
    weights = [f"{layer}.weight" for layer in range(12)]
    assert len(result["steps"]) == 3
    for step in result["steps"]:
        assert step["partitioned"] == weights, "after exports the ranks hold parts of the weights, and whole biases"
        assert step["wrong"] == [], "exported values are those that DeepSpeed gathers"
        assert step["exported"] == result["specs"], "names, types and shapes are those announced"
        assert step["untrained"] == [], "each step changes every parameter"
