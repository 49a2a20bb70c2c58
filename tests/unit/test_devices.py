"""Devices that ranks and engines are to use, and those that are there."""

from __future__ import annotations

import os
from typing import Any

import pytest
from jobs import world

from grpo_operator.topology import make_contract
from grpo_workload.contract import Contract
from grpo_workload.devices import check_devices, complain, count_devices, device_users


def contract(**changes: Any) -> Contract:
    return make_contract(*world(**changes), 0)


NODE_LOCAL = {
    "trainer": {"groups": [{"name": "a", "replicas": 2, "gpus": 4}]},
    "generation": {"topology": "NodeLocal", "tensorParallel": 2, "nodeLocal": {"gpusPerNode": 2}},
}


def test_ranks_and_engines_of_a_pod_and_their_devices() -> None:
    assert device_users(contract(**NODE_LOCAL), "job-a-1") == {"rank 2": (0,), "rank 3": (1,), "engine job-a-1/0": (2, 3)}
    assert device_users(contract(), "job-b-0") == {"rank 2": (0,)}


def test_all_there_is_nothing_to_say() -> None:
    assert complain("p", {"rank 0": (0,), "engine e": (1, 2)}, 3) == ""


def test_absent_devices_are_named_with_their_users_and_those_that_are_there() -> None:
    users = device_users(contract(**NODE_LOCAL), "job-a-1")
    said = complain("job-a-1", users, 3)
    assert said.startswith("pod job-a-1 is to run engine job-a-1/0 on device 3, but it sees devices 0, 1, 2 alone: lower gpus of its group")
    assert "see 4 whole GPUs" in said
    assert "rank 2 on device 0, rank 3 on device 1, engine job-a-1/0 on devices 2, 3, but it sees no CUDA device" in complain(
        "job-a-1", users, 0
    )
    assert "rank 3 on device 1, engine job-a-1/0 on devices 2, 3, but it sees device 0 alone" in complain("job-a-1", users, 1)


async def test_a_pod_is_asked_for_devices_only_when_it_computes_on_them() -> None:
    await check_devices(contract(device={"type": "cpu"}), "job-a-0")


async def test_without_the_driver_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if await count_devices(os.environ) != 0:
        pytest.skip("this machine has CUDA devices")
    with pytest.raises(ValueError, match="pod job-a-0 is to run rank 0 on device 0, rank 1 on device 1, but it sees no CUDA device"):
        await check_devices(contract(), "job-a-0")
