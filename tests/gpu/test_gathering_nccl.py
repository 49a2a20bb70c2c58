"""As `tests/trainer/test_exports.py`, over NCCL, whose collectives end after the call that began them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_workload.contract import Device

PROGRAMS = Path(__file__).parents[1] / "trainer" / "programs"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]


def test_what_is_gathered_is_what_was_trained() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={min(3, torch.cuda.device_count())}"]
    done = subprocess.run(
        [*launcher, str(PROGRAMS / "gathering.py"), Device.CUDA], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:]
