"""Which ranks use PyTorch's expandable segments, with which micro-batches of uneven sizes leave less memory unused; and
what no rank loads.
"""

import subprocess
import sys

import pytest

from grpo_spec.contract import Device
from grpo_spec.generation import GenerationConfig
from grpo_workload.ranks import environment


@pytest.mark.parametrize(
    ("generation", "is_expandable"),
    [
        ({}, True),
        ({"topology": "Server", "tensorParallel": 8}, True),
        ({"topology": "NodeLocal", "tensorParallel": 4}, True),
        ({"topology": "Colocate", "tensorParallel": 4}, False),  # ranks share memory with each other
    ],
)
def test_segments_expand_unless_ranks_share_an_engine(generation, is_expandable, monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    is_split = GenerationConfig.model_validate(generation).is_split_over_ranks
    environ: dict[str, str] = {}
    environment.prepare(Device.CUDA, environ, is_engine_split=is_split)
    assert (environ.get("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True") is is_expandable
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    environment.prepare(Device.CUDA, environ, is_engine_split=is_split)
    assert environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512", "what the user sets stays"


def test_deepspeed_asks_for_muon_without_loading_torchs_compiler():
    code = """
import sys
from grpo_workload.ranks import environment
environment.hide()
from deepspeed.runtime.zero.utils import is_zero_supported_optimizer
from deepspeed.runtime.zero import utils
utils.dist.get_rank = lambda: 1
import torch
assert is_zero_supported_optimizer(torch.optim.AdamW([torch.ones(1)]))
assert not is_zero_supported_optimizer(torch.optim.SGD([torch.ones(1)]))
assert "torch._inductor.compile_fx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
