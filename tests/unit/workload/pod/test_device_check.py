"""Asserts which devices ranks and engines of a pod need, and the message when the pod sees fewer."""

from __future__ import annotations

import os
from typing import Any

import pytest

from grpo_operator.layout.contracts import make_contract
from grpo_spec.contract import Contract
from grpo_workload.pod.device_check import check_devices, count_devices, describe_missing, device_users
from support.control_plane.jobs import world


def contract(**changes: Any) -> Contract:
    return make_contract(*world(**changes), 0)


NODE_LOCAL = {
    "trainer": {"groups": [{"name": "a", "replicas": 2, "gpus": 4}]},
    "generation": {"topology": "NodeLocal", "tensorParallel": 2, "nodeLocal": {"gpusPerNode": 2}},
}


def test_each_rank_and_engine_of_a_pod_has_its_devices() -> None:
    users = {"rank 2": (0,), "rank 3": (1,), "engine job-a-1/0": (2, 3)}
    assert device_users(contract(**NODE_LOCAL), "job-a-1") == users
    assert device_users(contract(), "job-b-0") == {"rank 2": (0,)}


def test_there_is_no_message_when_all_devices_exist() -> None:
    assert describe_missing("p", {"rank 0": (0,), "engine e": (1, 2)}, 3) == ""


def test_the_message_names_absent_devices_with_their_users_and_existing_devices() -> None:
    users = device_users(contract(**NODE_LOCAL), "job-a-1")
    three, one, none = (describe_missing("job-a-1", users, present) for present in (3, 1, 0))
    head = "pod job-a-1 must run engine job-a-1/0 on device 3, but sees only devices 0, 1, 2: lower gpus of its group"
    assert three.startswith(head)
    assert "give the pod 4 whole GPUs" in three
    assert "rank 3 on device 1, engine job-a-1/0 on devices 2, 3, but sees only device 0" in one
    assert "rank 2 on device 0, rank 3 on device 1, engine job-a-1/0 on devices 2, 3, but sees no CUDA device" in none


async def test_a_job_on_cpus_needs_no_devices() -> None:
    await check_devices(contract(device={"type": "cpu"}), "job-a-0")


async def test_a_pod_without_the_driver_sees_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if await count_devices(os.environ) != 0:
        pytest.skip("this machine has CUDA devices")
    said = "pod job-a-0 must run rank 0 on device 0, rank 1 on device 1, but sees no CUDA device"
    with pytest.raises(ValueError, match=said):
        await check_devices(contract(), "job-a-0")
