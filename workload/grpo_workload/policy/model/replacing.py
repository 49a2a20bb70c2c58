"""Replaces functions of a library for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Within it, each owner (a module or a class) has under the name the value; afterwards, what it had before."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
