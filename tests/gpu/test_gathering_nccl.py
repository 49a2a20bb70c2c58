"""The assertions of `tests/trainer/policy/test_gathering.py` over NCCL, whose collectives are asynchronous."""

import json

import pytest
import torch

from grpo_spec.contract import Device
from support.trainer.gpu_jobs import run_ranks
from support.trainer.program_errors import assert_gathered

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def test_gathered_weights_equal_the_trained_ones(tmp_path):
    ranks = min(3, torch.cuda.device_count())
    run_ranks("gathering.py", ranks, Device.CUDA, RESULTS=str(tmp_path))
    for rank in range(ranks):
        assert_gathered(json.loads((tmp_path / f"result-{rank}.json").read_text()))
