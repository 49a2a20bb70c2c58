"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 pod" or "2 pods". `many`: the plural, if it is not made by an s."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def every(number: int, one: str, many: str) -> str:
    """Return "the pod is" or "all 2 pods are"."""
    return f"the {one}" if number == 1 else f"all {number} {many}"
