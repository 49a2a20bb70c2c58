"""The KV cache of a colocated engine takes what training leaves of the GPU, and training has its memory again."""

import json
import re

import pytest
import torch

from support.trainer.gpu_jobs import EVEN, run_on_gpu
from support.trainer.random_llama import make_random_llama

pytestmark = pytest.mark.vllm


def test_a_job_without_a_size_takes_most_of_the_gpu_and_trains(tmp_path):
    make_random_llama(tmp_path / "model", "cpu", hidden=1024, layers=12, heads=16)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 32_768}))
    spec = {
        "model": {"path": str(tmp_path / "model")},
        "training": {"promptsPerStep": 16, "numGenerations": 16, "maxSteps": 2, "maxCompletionLength": 64},
        # 256 sequences of 32,768 tokens would take 200 GB: the cap on what a step can use is out of reach.
        "generation": {"maxModelLen": 32_768, "engineArgs": {"enforce_eager": True}},
    }
    rows = run_on_gpu(tmp_path, EVEN | spec)
    assert len(rows) == 2
    log = "\n".join(file.read_text() for file in (tmp_path / "run").glob("*/pods/*/*.log"))
    (taken,) = set(re.findall(r"the KV cache takes (\d+\.\d+) GiB", log))
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    print(f"the KV cache takes {taken} GiB of a GPU of {total:.1f} GiB")
    assert 0.78 * total < float(taken) < 0.92 * total  # 8% stay free; the trainer and the weights take the others
