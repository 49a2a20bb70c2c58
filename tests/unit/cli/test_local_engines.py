"""`grpo run` lets an engine pod that ends begin again, as often as failurePolicy lets the operator replace one.

The processes are real; in place of an engine, each notes what it finds in its folder, and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.local.engine_pods import EnginePods
from grpo_cli.local.processes import local_contract
from grpo_cli.local.restarts import LocalRestarts
from support.control_plane.jobs import world

KILLED = "state.joinpath('termination-log').touch()\n    os.kill(os.getpid(), 9)"
REFUSED = """said = '{"attempt": 0, "exitCode": 64, "reason": "ConfigError", "message": "generation.x is wrong"}'
    state.joinpath('termination-log').write_text(said)
    os._exit(64)"""
CUT_OFF = """state.joinpath('termination-log').write_bytes(b'{"attempt": 0, "exitCode": 7')
    os.kill(os.getpid(), 9)"""
ENDS = """
import os, pathlib
if pod := os.environ.get('POD_NAME'):
    state = pathlib.Path(os.environ['GRPO_STATE_DIR'])
    with open(os.environ['NOTES'], 'a') as notes:
        print(pod, *sorted(one.name for one in state.iterdir()), file=notes)
    state.joinpath('attempt-0').mkdir()
    {how}
"""


class Engines:
    """Two engine pods that end at once."""

    def __init__(self, folder: Path, how: str, **policy: Any) -> None:
        (folder / "sitecustomize.py").write_text(ENDS.format(how=how))
        (folder / "contract.json").write_text("{}")
        self._notes = folder / "notes"
        path = os.pathsep.join([str(folder), *sys.path])
        job, topology = world(
            generation={"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1, "replicas": 2}]}},
            failurePolicy={"backoffSeconds": 0} | policy,
        )
        variables = {pod: {"PYTHONPATH": path, "NOTES": str(self._notes)} for pod in topology.pods}
        self.said: list[str] = []
        self._restarts = LocalRestarts(job)
        self.pods = EnginePods(local_contract(job, topology), folder, variables, self.said.append, self._restarts)

    def go_on(self, steps: list[int]) -> bool:
        """Let each process end before each look; whether the run goes on."""
        goes_on = True
        for step in steps:
            for process in self.pods.processes.values():
                process.wait(30)
            self._restarts.forget_after_progress(step)
            goes_on = self.pods.goes_on(step)
        return goes_on

    @property
    def starts(self) -> list[str]:
        return self._notes.read_text().splitlines()


def test_another_begins_in_a_folder_without_state_until_the_restarts_are_used_up(tmp_path: Path) -> None:
    engines = Engines(tmp_path, KILLED, onGenerationFailure="RestartGeneration", maxRestarts=3)
    assert engines.go_on([5, 5]), "both have ended, and begun again"
    assert sorted(engines.pods.processes) == ["job-gen-0", "job-gen-1"]
    assert not engines.go_on([6])
    assert sorted(engines.starts) == [f"job-gen-{pod} launcher.log" for pod in (0, 0, 1, 1)]
    assert engines.pods.failed == {"job-gen-1"}
    assert "ended with -9 and no result" in engines.said[0]
    assert engines.said[0].endswith("another begins in 0 s")
    assert engines.said[-1] == ("no other job-gen-1 begins: all 3 restarts of failurePolicy.maxRestarts are used up")


def test_a_pod_killed_while_it_says_how_it_ends_begins_again(tmp_path: Path) -> None:
    engines = Engines(tmp_path, CUT_OFF, onGenerationFailure="RestartGeneration")
    assert engines.go_on([0])
    assert ["ended with -9 and no result" in line and "another begins" in line for line in engines.said] == [True, True]


def test_restarts_are_forgotten_after_steps(tmp_path: Path) -> None:
    engines = Engines(tmp_path, KILLED, onGenerationFailure="RestartGeneration", maxRestarts=2, recoverySteps=4)
    assert engines.go_on([0, 0, 4, 4, 8])
    assert len(engines.starts) == 6


def test_each_waits_twice_as_long(tmp_path: Path) -> None:
    policy = {"backoffSeconds": 100, "maxBackoffSeconds": 150}
    engines = Engines(tmp_path, KILLED, onGenerationFailure="RestartGeneration", **policy)
    assert engines.go_on([0, 0, 0])
    waits = [int(line.split()[-2]) for line in engines.said]
    assert len(engines.starts) == len(waits) == 2
    assert 80 <= waits[0] <= 120 <= waits[1] <= 180


@pytest.mark.parametrize(
    ("how", "policy", "why"),
    [
        (KILLED, {}, "failurePolicy.onGenerationFailure is RestartAll"),
        (REFUSED, {"onGenerationFailure": "RestartGeneration"}, "a restart would fail on the same settings"),
    ],
)
def test_none_begins_again_where_the_operator_would_replace_none(
    tmp_path: Path, how: str, policy: dict[str, str], why: str
) -> None:
    engines = Engines(tmp_path, how, **policy)
    assert not engines.go_on([0])
    assert engines.said == [f"no other job-gen-{pod} begins: {why}" for pod in (0, 1)]
    assert len(engines.starts) == 2
