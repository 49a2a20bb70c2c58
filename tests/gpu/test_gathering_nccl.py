"""The assertions of `tests/trainer/policy/test_gathering.py` over NCCL, whose collectives are asynchronous."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_spec.contract import Device
from support.paths import PROGRAMS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

LAYERS = 12


def test_gathered_weights_equal_the_trained_ones(tmp_path: Path) -> None:
    ranks = min(3, torch.cuda.device_count())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(PROGRAMS / "gathering.py"), Device.CUDA],
        env=os.environ | {"RESULTS": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    for rank in range(ranks):
        result = json.loads((tmp_path / f"result-{rank}.json").read_text())
        assert len(result["steps"]) == 3
        for step in result["steps"]:
            assert step["partitioned"] == [f"{layer}.weight" for layer in range(LAYERS)]
            assert step["wrong"] == [], "exported values are those that DeepSpeed gathers"
            assert step["exported"] == result["specs"], "names, types and shapes are those announced"
            assert step["untrained"] == [], "each step changes every parameter"
