"""Assertions on errors that test programs report."""

from __future__ import annotations

import re
from collections.abc import Sequence


def assert_error(error: Sequence[str] | None, kind: str, pattern: str) -> None:
    """Assert that `error`, from a program's `error_of`, is of type `kind` with a message that contains `pattern`."""
    assert error is not None, f"no {kind} was raised"
    name, message = error
    assert name == kind, f"{name}: {message}"
    assert re.search(pattern, message), f"{pattern!r} does not match {message!r}"
