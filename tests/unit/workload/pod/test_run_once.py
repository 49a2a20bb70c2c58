"""Asserts that a fault of the launcher itself is recorded as its own, not as a mistake of the user."""

import asyncio
import json
from pathlib import Path

import pytest

from grpo_workload.pod.run_once import run_once
from grpo_workload.spec.contract import Contract
from grpo_workload.spec.reports import ExitCode, Outcome
from support.trainer.places import place


async def parses_nonsense(stop: asyncio.Event) -> Outcome:
    return json.loads("[")


async def reads_a_wrong_contract(stop: asyncio.Event) -> Outcome:
    Contract.model_validate({})
    raise AssertionError


@pytest.mark.parametrize("run", [parses_nonsense, reads_a_wrong_contract])
def test_any_exception_becomes_an_outcome_that_names_it(tmp_path: Path, run) -> None:
    pod = place(tmp_path, "job-a-0")
    outcome = asyncio.run(run_once(pod, run))
    assert (outcome.exit_code, outcome.reason) == (ExitCode.RANK_FAILED, "InternalError")
    assert "pod job-a-0: its launcher failed with" in outcome.message
    assert Outcome.model_validate_json(pod.termination_log.read_text()) == outcome
