"""Weights that ZeRO-3 keeps in parts, gathered for engines and checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from grpo_workload.contract import Device


def test_what_is_gathered_is_what_was_trained(run_program: Callable[..., None]) -> None:
    run_program("gathering.py", 3, Device.CPU)
