"""`grpo run` lets another attempt begin after a rank has failed, with `restartStrategy: InPlace`, as the operator does.

The processes are real; in place of a launcher, each notes the contract that it finds, and ends as the test says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.local.processes import local_contract
from grpo_cli.local.restarts import LocalRestarts
from grpo_cli.local.trainer_pods import TrainerPods
from support.control_plane.jobs import world

ENDS = """
import json, os, pathlib
if pod := os.environ.get('POD_NAME'):
    contract = json.loads(pathlib.Path(os.environ['GRPO_CONTRACT']).read_text())
    attempt, training = contract['attempt'], contract['config']['training']
    with open(os.environ['NOTES'], 'a') as notes:
        print(pod, attempt, training.get('maxTokensPerMicroBatch'), file=notes)
    outcome = json.loads(os.environ['ENDS'])[pod]
    outcome = outcome[attempt] if isinstance(outcome, list) else outcome
    if outcome is not None:
        outcome = {'attempt': attempt, 'message': 'the end'} | outcome
        pathlib.Path(os.environ['GRPO_TERMINATION_LOG']).write_text(json.dumps(outcome))
    os._exit(9 if outcome is None else outcome['exitCode'])
"""
KILLED = {"exitCode": 70, "reason": "RankFailed", "message": "rank 0 was killed by SIGKILL\nits log"}
RAISED = {"exitCode": 70, "reason": "RankFailed", "message": "rank 0 failed with exit code 1: KeyError: 'a'"}
LOST = {"exitCode": 69, "reason": "PeerLost"}
FULL = {"exitCode": 70, "reason": "OutOfMemory"}


class Trainers:
    """Two trainer pods that end at once."""

    def __init__(self, folder: Path, *ends: dict[str, Any] | list[dict[str, Any] | None] | None, **policy: Any) -> None:
        (folder / "sitecustomize.py").write_text(ENDS)
        self._notes = folder / "notes"
        job, topology = world(
            trainer={"groups": [{"name": "a", "replicas": 2, "gpus": 1}]},
            training={"maxTokensPerMicroBatch": 4096},
            failurePolicy={"backoffSeconds": 0, "restartStrategy": "InPlace"} | policy,
        )
        variables = {
            "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
            "NOTES": str(self._notes),
            "ENDS": json.dumps(dict(zip(topology.pods, ends, strict=True))),
        }
        self.said: list[str] = []
        self._pods = pods = TrainerPods(
            job,
            local_contract(job, topology),
            folder,
            dict.fromkeys(topology.pods, variables),
            self.said.append,
            LocalRestarts(job),
        )
        self.outcomes = pods.outcomes

    def run(self, steps: int = 0) -> list[str]:
        """Let them end and begin until they do not any more; return what each found, and the number of exit codes."""
        while self._pods.goes_on(steps):
            for process in self._pods.processes.values():
                process.wait(30)
        return sorted(self._notes.read_text().splitlines())


def test_attempts_begin_in_all_pods_until_the_restarts_are_used_up(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, LOST, KILLED, maxRestarts=2)
    assert trainers.run() == [f"job-a-{pod} {attempt} 4096" for pod in (0, 1) for attempt in (0, 1, 2)]
    assert trainers.said == [
        "job-a-1: RankFailed: rank 0 was killed by SIGKILL; attempt 1 begins in 0 s",
        "job-a-1: RankFailed: rank 0 was killed by SIGKILL; attempt 2 begins in 0 s",
        "no other attempt begins: all 2 restarts of failurePolicy.maxRestarts are used up",
    ]


def test_an_exception_that_comes_again_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, LOST, RAISED)
    assert len(trainers.run()) == 4
    assert "the same exception at the same step" in trainers.said[-1]


def test_a_launcher_that_dies_in_a_later_attempt_does_not_end_as_the_one_before(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, [KILLED, None], LOST)
    assert len(trainers.run()) == 4, "its ranks may still run, so no third attempt begins"
    assert trainers.outcomes()["job-a-0"].reason == "LauncherDied"


def test_attempts_without_memory_have_smaller_micro_batches(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, FULL, LOST, maxRestarts=0)
    assert trainers.run()[:4] == [f"job-a-0 {attempt} {4096 >> attempt}" for attempt in range(4)]


@pytest.mark.parametrize(
    ("end", "policy"),
    [
        (KILLED, {"restartStrategy": "Recreate"}),
        ({"exitCode": 75, "reason": "Stopped"}, {}),
        ({"exitCode": 64, "reason": "ConfigError"}, {}),
        (None, {}),  # its ranks may still run
        ({"exitCode": 0, "reason": "Done"}, {}),
    ],
)
def test_a_run_ends_at_its_first_end_otherwise(
    tmp_path: Path, end: dict[str, Any] | None, policy: dict[str, str]
) -> None:
    trainers = Trainers(tmp_path, end, LOST, **policy)
    assert trainers.run() == ["job-a-0 0 4096", "job-a-1 0 4096"]
