"""Asserts how a pod reads its contract: which variables it needs, and which contracts it refuses with which message."""

import json
from pathlib import Path

import pytest

from grpo_workload.pod.contract_file import ContractError, ThisPod, parse_contract
from support.trainer.places import CONTRACT, MEMBERS


def test_another_version_is_refused_before_anything_else_is_read() -> None:
    said = "operator wrote contractVersion 2, this image reads contractVersion 1"
    with pytest.raises(ContractError, match=said) as refused:
        parse_contract(json.dumps({"contractVersion": 2, "attempt": 7, "unknown": "field"}))
    assert refused.value.attempt == 7


def test_an_invalid_contract_names_the_field() -> None:
    with pytest.raises(ContractError, match="device"):
        parse_contract(json.dumps({**CONTRACT, "contractVersion": 1, "members": MEMBERS, "device": "abacus"}))


def test_a_plain_start_names_the_missing_variables() -> None:
    with pytest.raises(ValueError, match=r"GRPO_CONTRACT, POD_NAME, POD_UID.*operator.*grpo run"):
        ThisPod.read({})


def test_a_missing_contract_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        ThisPod.read({"POD_NAME": "pod-0", "POD_UID": "u", "GRPO_CONTRACT": str(tmp_path / "nowhere")})


def test_a_pod_is_read_from_the_variables(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    path.write_text(json.dumps({**CONTRACT, "contractVersion": 1, "members": MEMBERS}))
    environ = {"POD_NAME": "job-b-0", "POD_UID": "uid-1", "GRPO_CONTRACT": str(path), "GRPO_STATE_DIR": str(tmp_path)}

    pod = ThisPod.read(environ)

    assert (pod.contract.attempt, pod.pod, pod.pod_uid, pod.state_dir) == (3, "job-b-0", "uid-1", tmp_path)
    assert (pod.termination_log, pod.data_dir) == (Path("/dev/termination-log"), Path("/data"))
