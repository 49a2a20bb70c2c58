"""Asserts that pods of a job for GPUs end before they start a rank or an engine when there are no CUDA devices."""

import json
import os
from pathlib import Path

import pytest

from grpo_spec.contract import Device
from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.pod.device_check import count_devices
from support.trainer.engines import Engines, make_contract
from support.trainer.launchers import DEADLINE, World


@pytest.fixture(autouse=True)
async def _no_devices():
    if await count_devices(os.environ) != 0:
        pytest.skip("this machine has CUDA devices")


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, [2], '\n    mark("ran")\n')
    made.contract.write_text(json.dumps(made.values | {"device": "cuda"}))
    yield made
    made.close()


def test_a_launcher_starts_no_rank(world):
    (pod,) = world.start()
    outcome = pod.ends()
    assert (outcome.exit_code, outcome.reason) == (ExitCode.CONFIG_ERROR, "ConfigError")
    assert outcome.message.startswith(
        "pod pod-0 must run rank 0 on device 0, rank 1 on device 1, but sees no CUDA device: lower gpus"
    )
    assert pod.marks("ran") == []


def test_an_engine_pod_starts_no_engine(tmp_path):
    pods = Engines(tmp_path, make_contract(Path("/nowhere"), [(2, 1)]).model_copy(update={"device": Device.CUDA}))
    (engine,) = pods.contract.engines
    assert pods.start(engine).wait(DEADLINE) == ExitCode.CONFIG_ERROR
    outcome = Outcome.model_validate_json(pods.termination_log(engine).read_text())
    assert outcome.reason == "ConfigError"
    assert outcome.message.startswith("pod engine-0 must run engine engine-0 on devices 0, 1, but sees no CUDA device")
