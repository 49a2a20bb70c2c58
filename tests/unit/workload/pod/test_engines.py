"""Asserts that a pod reads all that its engines print, stops those it has started when another cannot start, and lets
those that are well go on when a later attempt begins in it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from grpo_spec.contract import Contract
from grpo_workload.pod import contract_file, engines
from grpo_workload.pod.engine_main import EnginePod, run_engines
from grpo_workload.pod.engines import LINE_BYTES, EngineProcess, PodEngines, abandoned, running_engines
from grpo_workload.pod.run_once import run_once
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
    monkeypatch.setattr(engines, "engine_command", lambda _, engine, **_more: (commands[engine.name], dict(os.environ)))
    with pytest.raises(FileNotFoundError):
        async with running_engines(contract, contract.engines):
            pytest.fail("the second engine cannot run")
    (only,) = started
    assert only._process.returncode is not None


SERVES = """
import http.server, json, pathlib, sys
status, file = int(sys.argv[2]), pathlib.Path(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, said):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())
    def do_GET(self):
        self.answer(status, {"weight_version": file.read_text()})
    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refuses = file.with_suffix(".refuses").exists()
        if not refuses:
            file.write_text(said["new_version"])
        self.answer(500 if refuses else 200, {"success": True} | said)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def serves(monkeypatch: pytest.MonkeyPatch, file: Path, version: str = "7", status: int = 200) -> Contract:
    """Return the contract of an engine whose process answers with this status, and with the version in a file."""
    file.write_text(version)
    contract = make_contract(Path("/nowhere"), [(1, 1)])
    command = [sys.executable, "-c", SERVES, str(contract.engines[0].port), str(status), str(file)]
    monkeypatch.setattr(engines, "engine_command", lambda *_, **_more: (command, dict(os.environ)))
    return contract


async def start(pod_engines: PodEngines, contract: Contract) -> int:
    """Begin an attempt; return the process of its engine, which listens."""
    (await pod_engines.begin(contract, contract.engines)).cancel()
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", contract.engines[0].port)
            writer.close()
            return pod_engines._processes[0]._process.pid
        await asyncio.sleep(0.01)


@pytest.fixture
async def pod_engines() -> AsyncIterator[PodEngines]:
    """Engines of a pod, which end with the test."""
    made = PodEngines()
    yield made
    await made.stop()


@pytest.mark.parametrize(
    ("status", "version", "changes", "refuses", "goes_on"),
    [
        (200, "7", {}, False, True),
        (200, "default", {}, False, False),  # no push came to its end
        (200, abandoned(0), {}, False, False),
        (500, "7", {}, False, False),
        (200, "7", {}, True, False),
        (200, "7", {"maxModelLen": 64}, False, False),
    ],
)
async def test_an_engine_goes_on_in_a_later_attempt_if_it_is_the_same_and_was_pushed_to(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    status: int,
    version: str,
    changes: dict[str, int],
    refuses: bool,
    goes_on: bool,
    pod_engines: PodEngines,
) -> None:
    contract = serves(monkeypatch, file := tmp_path / "version", version, status)
    if refuses:
        file.with_suffix(".refuses").touch()
    raw = contract.model_dump(by_alias=True) | {"attempt": 1}
    raw["config"]["generation"] |= changes
    first = await start(pod_engines, contract)
    assert (await start(pod_engines, Contract.model_validate(raw)) == first) == goes_on
    assert (file.read_text() == abandoned(1)) == goes_on, "ranks are told which they may use"


async def test_an_engine_goes_on_once_more_after_a_rank_was_killed_before_its_first_push_had_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pod_engines: PodEngines
) -> None:
    contract = serves(monkeypatch, version := tmp_path / "version")
    processes = []
    for found in ("default", "7", abandoned(1), "4", abandoned(3), abandoned(4), abandoned(5)):
        version.write_text(found)
        processes.append(await start(pod_engines, contract))
    first, *later = processes
    assert later[:4] == [first] * 4
    assert len(set(processes)) == 3, "one that two attempts pushed nothing to is started again, and so is a new one"


async def test_an_engine_that_hangs_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pod_engines: PodEngines
) -> None:
    contract = serves(monkeypatch, tmp_path / "version")
    monkeypatch.setattr(engines, "ANSWER_SECONDS", 0.1)
    first = await start(pod_engines, contract)
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(EngineProcess.stop, "__defaults__", (0.1,))
    assert await start(pod_engines, contract) != first


async def test_engines_that_go_on_are_watched_in_the_later_attempt_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, pod_engines: PodEngines
) -> None:
    caplog.set_level("INFO")
    contract = serves(monkeypatch, tmp_path / "version")
    monkeypatch.setattr(contract_file, "POLL_SECONDS", 0.01)
    files = {"termination_log": tmp_path / "log", "contract_path": tmp_path / "contract.json"}
    pod = EnginePod(contract=contract, pod="engine-0", pod_uid="u", state_dir=tmp_path, **files)
    later = contract.model_copy(update={"attempt": 1})
    first = await start(pod_engines, contract)
    (tmp_path / "contract.json").write_text(later.model_dump_json(by_alias=True))
    assert await run_once(pod, partial(run_engines, pod, pod_engines)) is None, "a later attempt begins"
    pod = replace(pod, contract=later)
    running = asyncio.create_task(run_once(pod, partial(run_engines, pod, pod_engines)))
    while "attempt 1: engines go on" not in caplog.text:  # noqa: ASYNC110  # a log sets no event
        await asyncio.sleep(0.01)
    os.kill(first, signal.SIGKILL)
    outcome = await running
    assert outcome is not None
    assert (outcome.attempt, outcome.reason) == (1, "EngineDied")
