"""Adapters pushed over NCCL arrive at an engine, which keeps its own weights; prints seconds."""

import time

import pytest
import torch

from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.weights.export import Export
from support.trainer.nccl_engines import BF16_ERROR, difference, serving
from support.trainer.random_llama import make_random_llama

pytestmark = pytest.mark.vllm

LORA = LoraConfig(r=4, alpha=6, push="adapters")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 0.3 billion parameters in bfloat16 on the first GPU; its name is its folder."""
    return make_random_llama(tmp_path_factory.mktemp("llama"), "cuda:0", hidden=1024, layers=16, heads=8)


def test_adapters_arrive_and_the_model_keeps_its_weights(model, tmp_path):
    with serving(model, tmp_path, 1, lora=LORA) as (generator, _):
        adapters = Adapters(model, LORA, seed=0)
        model.to("cuda:0")
        seconds = []
        for version in range(1, 5):
            with torch.no_grad():
                for parameter in adapters.trained():
                    parameter.normal_(std=0.05)
            stale = difference(model, generator)
            start = time.perf_counter()
            generator.sync_weights(Export(adapters.pushed(), is_partitioned=False), version)
            seconds.append(round(time.perf_counter() - start, 4))
            fresh = difference(model, generator)
            assert fresh < BF16_ERROR
            assert stale > 5 * fresh
        with adapters.disabled():
            assert difference(model, generator) > 5 * fresh
        print(f"pushes took {seconds} s; mean difference {stale:.3f} before, {fresh:.4f} after")
