"""Asserts what a rank does that is started ahead of its attempt: it loads its programs, and then does as it is told."""

import gc
import json
import os
import subprocess
import sys

import pytest

from grpo_spec.contract import ENV_CONTRACT, ENV_STATE_DIR
from grpo_spec.reports import ExitCode
from grpo_workload import rank
from grpo_workload.ranks import environment
from grpo_workload.ranks.environment import ENV_WAITS
from grpo_workload.reporting.progress_files import read_phase
from grpo_workload.reporting.start_log import machine_seconds, process_start
from grpo_workload.training import train
from support.trainer.places import contract_json


@pytest.fixture
def began(tmp_path, monkeypatch):
    """Attempt and `began` of each call of `run_rank`; the rank waits, and has the contract of attempt 0."""
    calls = []
    monkeypatch.setattr(train, "run_rank", lambda contract, *, began, **_: calls.append((contract.attempt, began)) or 0)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    ours = {ENV_CONTRACT: str(tmp_path / "contract"), ENV_STATE_DIR: str(tmp_path), "RANK": "0", ENV_WAITS: "1"}
    monkeypatch.setattr(os, "environ", {**os.environ, **ours})
    write_contract(tmp_path, 0)
    yield calls
    gc.unfreeze()


@pytest.fixture
def launcher(monkeypatch):
    """The rank's stdin, open for the launcher to write."""
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w") as launcher:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield launcher


def write_contract(folder, attempt):
    (folder / "contract").write_text(json.dumps(contract_json({}, attempt=attempt)))


def test_it_reads_the_contract_when_it_is_told_to_begin(began, launcher, tmp_path, monkeypatch):
    told = machine_seconds()

    def load(device, environ, **_):
        assert not subprocess.run(["cat"], stdin=sys.stdin, stdout=subprocess.PIPE, timeout=60, check=True).stdout, (
            "a program of an import's"
        )
        write_contract(tmp_path, 7)
        launcher.write(f"{told}\n")
        launcher.flush()

    monkeypatch.setattr(environment, "prepare", load)
    assert rank.main() == 0
    ((attempt, at),) = began
    assert attempt == 7
    assert process_start() + 0.5 < at == told, "of the time of this process, what was before it began is left out"
    assert read_phase(tmp_path, 0)[0] == "Loading"


def test_it_ends_with_its_launcher(began, launcher, tmp_path):
    launcher.close()
    assert rank.main() == ExitCode.STOPPED
    assert not began
    assert read_phase(tmp_path, 0) is None
