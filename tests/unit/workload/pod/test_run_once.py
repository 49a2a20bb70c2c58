"""Asserts that a fault of the launcher itself is recorded as its own, not as a mistake of the user, and that what runs
is asked to end when a later attempt begins in its pod.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_spec.contract import Contract
from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.pod import contract_file
from grpo_workload.pod.run_once import make_outcome, run_once
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
    assert outcome is not None
    assert (outcome.exit_code, outcome.reason) == (ExitCode.RANK_FAILED, "InternalError")
    assert "pod job-a-0: its launcher failed with" in outcome.message
    assert Outcome.model_validate_json(pod.termination_log.read_text()) == outcome


def test_what_runs_is_asked_to_end_when_a_later_attempt_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract_file, "POLL_SECONDS", 0.01)
    pod = replace(place(tmp_path, "job-a-0"), contract_path=tmp_path / "contract.json")
    later = replace(pod, contract=pod.contract.model_copy(update={"attempt": 4}))

    async def engines(stop: asyncio.Event) -> Outcome:
        fresh = tmp_path / "fresh.json"
        fresh.write_text(later.contract.model_dump_json(by_alias=True))
        fresh.replace(pod.contract_path)
        await stop.wait()
        return make_outcome(pod, ExitCode.STOPPED, "Stopped", "asked to end")

    async def dies(stop: asyncio.Event) -> Outcome:
        assert later.termination_log.read_text() == "", "the earlier attempt's outcome would be taken for this one's"
        raise OSError("disk")

    assert asyncio.run(run_once(pod, engines)) is None
    outcome = asyncio.run(run_once(later, dies))
    assert outcome is not None
    assert (outcome.attempt, outcome.reason) == (4, "InternalError")
