"""QLoRA with the kernels for GPUs: memory, rounding and time of the policy, and a whole job beside plain LoRA."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_spec.contract import Device
from support.paths import PROGRAMS
from support.trainer.gpu_jobs import become_only_rank, run_on_gpu
from support.trainer.random_llama import make_random_llama
from support.trainer.step_settings import bare_settings

pytestmark = pytest.mark.vllm

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 1.6 billion parameters in bfloat16."""
    folder = tmp_path_factory.mktemp("llama")
    make_random_llama(folder, "cuda:0", hidden=2048, layers=24, heads=16)
    gc.collect()
    torch.cuda.empty_cache()
    return folder


def test_a_job_samples_from_the_rounded_model_that_it_trains(model: Path, tmp_path: Path) -> None:
    kl = {}
    for in_4_bits in (False, True):
        (folder := tmp_path / str(in_4_bits)).mkdir()
        spec = {
            "model": {"path": str(model)},
            "lora": {"loadIn4Bit": in_4_bits},
            "dataset": {"reasoningGym": {"dataset": "basic_arithmetic"}},
            "rewards": [{"name": "even", "function": "token_reward:even_tokens"}],
            "training": {
                "promptsPerStep": 4,
                "numGenerations": 8,
                "maxSteps": STEPS,
                "maxCompletionLength": 64,
                "learningRate": 1e-4,
                "beta": 0.04,
            },
            "parallelism": {"gradientCheckpointing": True},
            "generation": {"maxModelLen": 256, "kvCacheMemory": "1Gi", "engineArgs": {"enforce_eager": True}},
        }
        rows = run_on_gpu(folder, spec)
        assert len(rows) == STEPS
        assert all(row["grad_norm"] > 0 for row in rows)
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-3), "the reference is the rounded model"
        kl[in_4_bits] = max(row["trained/sampling/kl"] for row in rows)
    print(f"KL to the engine: {kl[True]:.2g} in 4 bits, {kl[False]:.2g} in 16")
    assert kl[True] < 3 * kl[False] + 1e-4


@pytest.fixture
def world() -> Any:
    """A world of one rank, with the environment of a job on CUDA."""
    become_only_rank()
    sys.path.append(str(PROGRAMS))
    yield
    sys.path.remove(str(PROGRAMS))
    dist.destroy_process_group()


def test_weights_in_4_bits_take_a_quarter_of_the_memory_also_while_they_are_loaded(model: Path, world: Any) -> None:
    peaks, weights = {}, {}
    for in_4_bits in (False, True, True):
        before = clean()
        policy, training = make_policy(model, in_4_bits=in_4_bits)
        held, peaks[in_4_bits] = (
            number - before for number in (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        )
        now = {name: weight.cpu() for name, weight in policy.weights()}
        if in_4_bits in weights:  # another attempt rounds them to the same values, bit for bit
            assert all(weight.equal(weights[in_4_bits][name]) for name, weight in now.items())
        weights[in_4_bits] = now
        seconds = [timed_step(policy, training) for _ in range(3)][-1]
        print(
            f"4 bits: {in_4_bits}; after loading {held / 2**30:.2f} GiB, at most {peaks[in_4_bits] / 2**30:.2f} GiB; "
            f"a step of 16 sequences of 1024 tokens takes {seconds:.3f} s"
        )
        del policy, now
    assert peaks[True] < 0.45 * peaks[False]
    for name, weight in weights[False].items():
        rounded = weights[True][name]
        change = float((rounded.float() - weight.float()).norm() / weight.float().norm())
        assert 0.05 < change < 0.15 if "_proj" in name else change == 0, name


def clean() -> int:
    """Free what is free; return the bytes that are not."""
    for _ in range(4):  # an earlier policy is held by garbage that goes in several collections
        gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def make_policy(model: Path, *, in_4_bits: bool) -> tuple[Any, Any]:
    # These imports read the variables that `world` sets.
    from accelerate.state import AcceleratorState

    from grpo_workload.policy.step.policy import Policy

    AcceleratorState._reset_state(reset_partial_state=True)
    config = bare_settings(
        str(model),
        "bfloat16",
        training={"importanceSamplingCorrection": "none"},
        lora={"loadIn4Bit": in_4_bits},
        parallelism={"gradientCheckpointing": True},
    )
    return Policy(config, Device.CUDA, timeout_seconds=120, pad_token_id=2), config.training


def timed_step(policy: Any, training: Any) -> float:
    """Take a step on random samples; return its seconds."""
    from fixed_samples import train_on

    from grpo_workload.algorithm.samples import Completion, Prompt, Sample

    random = torch.Generator().manual_seed(0)
    samples = []
    for index in range(16):
        prompt, answer = (tuple(torch.randint(3, 250, (512,), generator=random).tolist()) for _ in range(2))
        completion = Completion(
            token_ids=answer, logprobs=(-5.0,) * 512, text="", finish_reason="length", weight_version=0
        )
        known = Prompt(index=index, text="", token_ids=prompt)
        samples.append(Sample(prompt=known, completion=completion, reward=0.0, advantage=float(index % 2 * 2 - 1)))
    torch.cuda.synchronize()
    start = time.perf_counter()
    train_on(policy, [samples], training)
    torch.cuda.synchronize()
    return time.perf_counter() - start
