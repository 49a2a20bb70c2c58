"""Asserts that pods agree on ranks and their variables, and that contracts with inconsistent members are refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_spec.contract import RANK_ENV, Contract
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.rank_processes import added_variables
from grpo_workload.pod.contract_file import ContractError
from support.trainer.places import CONTRACT


def contract_json(gpus: list[int]) -> dict[str, Any]:
    members = [
        {"pod": f"pod-{n}", "group": "a", "host": f"pod-{n}.job", "gpus": count, "rankOffset": sum(gpus[:n])}
        for n, count in enumerate(gpus)
    ]
    return {**CONTRACT, "members": members}


def place_of(contract: Contract, pod: str) -> Place:
    return Place(contract=contract, pod=pod, pod_uid="uid", state_dir=Path("/state"), termination_log=Path("/log"))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=20))
def test_ranks_of_all_pods_are_unique_and_contiguous(gpus: list[int]) -> None:
    contract = Contract.model_validate(contract_json(gpus))
    places = [place_of(contract, member.pod) for member in contract.members]

    envs = [place.rank_env(local_rank) for place in places for local_rank in range(place.member.gpus)]

    assert [int(env["RANK"]) for env in envs] == list(range(sum(gpus)))
    assert [rank for place in places for rank in place.ranks] == list(range(sum(gpus)))
    assert {env["WORLD_SIZE"] for env in envs} == {str(sum(gpus))}
    assert {env["MASTER_ADDR"] for env in envs} == {"pod-0.job"}
    assert [place.is_master for place in places] == [True] + [False] * (len(gpus) - 1)
    assert all(set(env) == set(RANK_ENV) for env in envs)


def test_sets_of_strings_have_the_same_order_in_all_ranks() -> None:
    contract = Contract.model_validate(contract_json([1, 1]))
    code = "print({'a', 'b', 'c', 'd', 'e', 'f'}, end='')"
    orders = {
        subprocess.check_output([sys.executable, "-c", code], env=added_variables(place_of(contract, pod), 0, {}))
        for pod in ("pod-0", "pod-1")
        for _ in range(3)
    }
    assert len(orders) == 1
    chosen = added_variables(place_of(contract, "pod-0"), 0, {"PYTHONHASHSEED": "7"})
    assert chosen["PYTHONHASHSEED"] == "7"


@given(st.lists(st.integers(1, 16), min_size=2, max_size=8), st.data())
def test_ranks_that_overlap_or_leave_gaps_are_refused(gpus: list[int], data: st.DataObject) -> None:
    raw = contract_json(gpus)
    broken = data.draw(st.sampled_from(raw["members"]))
    broken["rankOffset"] = data.draw(st.integers(0, 200).filter(lambda offset: offset != broken["rankOffset"]))

    with pytest.raises(ContractError, match=rf"members\[{broken['pod']}\].rankOffset is {broken['rankOffset']}"):
        place_of(Contract.model_validate(raw), "pod-0")


def test_a_pod_that_is_not_a_member_is_refused() -> None:
    with pytest.raises(ContractError, match=r"POD_NAME 'pod-9' must name exactly one member .* pod-0, pod-1"):
        place_of(Contract.model_validate(contract_json([1, 2])), "pod-9")
