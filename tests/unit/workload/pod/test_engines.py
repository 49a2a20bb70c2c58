"""Asserts that a pod reads all that its engines print, and stops those it has started when another cannot start."""

import os
import sys
from pathlib import Path

import pytest

from grpo_workload.pod import engines
from grpo_workload.pod.engines import LINE_BYTES, EngineProcess, running_engines
from support.trainer.engines import make_contract

PRINTS_A_LONG_LINE = f"""
print("x" * {3 * LINE_BYTES})
print("RuntimeError: printed after it")
raise SystemExit(3)
"""


async def test_a_line_of_any_length_neither_stalls_the_engine_nor_hides_what_comes_after_it() -> None:
    (engine,) = make_contract(Path("/nowhere"), [(1, 1)]).engines
    process = await EngineProcess.start(engine, [sys.executable, "-c", PRINTS_A_LONG_LINE], os.environ)
    happened = await process.wait()
    await process.stop()
    assert f"engine {engine.name} ended with exit code 3; its first error is RuntimeError: printed after it" in happened
    assert f"[part of a line over {LINE_BYTES} bytes was left out]" in happened


async def test_engines_that_run_are_stopped_when_the_next_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = make_contract(Path("/nowhere"), [(1, 1), (1, 1)])
    first, second = contract.engines
    commands = {first.name: ["sleep", "600"], second.name: ["/no/such/program"]}
    started: list[EngineProcess] = []
    start = EngineProcess.start

    async def record(*arguments: object) -> EngineProcess:
        started.append(await start(*arguments))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(EngineProcess, "start", record)
    monkeypatch.setattr(engines, "engine_command", lambda _, engine: (commands[engine.name], dict(os.environ)))
    with pytest.raises(FileNotFoundError):
        async with running_engines(contract, contract.engines):
            pytest.fail("the second engine cannot run")
    (only,) = started
    assert only._process.returncode is not None
