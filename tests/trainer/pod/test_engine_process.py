"""Asserts what the first process of an engine pod refuses, that it runs once, and which engines ranks use."""

import signal
from pathlib import Path

import pytest

from grpo_spec.contract import Contract
from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.pod.contract_file import ContractError
from grpo_workload.pod.engine_main import EnginePod
from support.trainer.engines import Engines, make_contract
from support.trainer.launchers import DEADLINE, eventually


def test_a_restarted_pod_reports_its_outcome_again_and_holds(tmp_path):
    pods = Engines(tmp_path, make_contract(Path("/nowhere"), [(1, 1)], engineArgs={"port": 1}), forks=False)
    (engine,) = pods.contract.engines
    log = pods.termination_log(engine)

    assert pods.start(engine).wait(DEADLINE) == ExitCode.CONFIG_ERROR
    first = Outcome.model_validate_json(log.read_text())
    assert (first.reason, first.message) == (
        "ConfigError",
        "generation.engineArgs: port cannot be set, the trainer sets it itself",
    )

    log.unlink()
    held = pods.start(engine)
    eventually(lambda: log.exists() and log.read_text(), "the outcome is reported again")
    assert held.poll() is None
    held.send_signal(signal.SIGTERM)
    assert held.wait(DEADLINE) == ExitCode.CONFIG_ERROR
    assert Outcome.model_validate_json(log.read_text()) == first


def test_a_pod_without_an_engine_is_refused(tmp_path):
    contract = make_contract(Path("/nowhere"), [(1, 1), (1, 1)])
    (tmp_path / "contract.json").write_text(contract.model_dump_json(by_alias=True))
    environ = {"GRPO_CONTRACT": str(tmp_path / "contract.json"), "POD_NAME": "other", "POD_UID": "u"}
    with pytest.raises(
        ContractError, match="'other' must name the pod of an engine; the contract has: engine-0, engine-1"
    ):
        EnginePod.read(environ)
    assert [engine.name for engine in EnginePod.read(environ | {"POD_NAME": "engine-1"}).engines] == ["engine-1"]


def test_with_nodelocal_ranks_use_the_engines_of_their_own_pod():
    raw = make_contract(Path("/nowhere"), [(1, 1), (1, 1), (1, 1)]).model_dump(by_alias=True)
    raw["members"] = [
        {**raw["members"][0], "pod": f"engine-{index}", "gpus": 2, "rankOffset": 2 * index} for index in range(3)
    ]
    server = Contract.model_validate(raw)
    raw["config"]["generation"]["topology"] = "NodeLocal"
    node_local = Contract.model_validate(raw)

    assert [len(server.engines_of(rank)) for rank in range(6)] == [3] * 6
    assert [[engine.name for engine in node_local.engines_of(rank)] for rank in (0, 1, 2, 5)] == [
        ["engine-0"],
        ["engine-0"],
        ["engine-1"],
        ["engine-2"],
    ]
