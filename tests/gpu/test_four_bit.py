"""QLoRA with the kernels for GPUs: memory, rounding and time of the policy, and a whole job beside plain LoRA."""

import gc
import time

import pytest
import torch

from grpo_spec.contract import Device
from support.trainer.gpu_jobs import EVEN, SMALL_ENGINE, only_world, run_on_gpu
from support.trainer.random_llama import make_random_llama
from support.trainer.samples import make_sample
from support.trainer.step_settings import bare_settings

pytestmark = pytest.mark.vllm

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 1.6 billion parameters in bfloat16."""
    folder = tmp_path_factory.mktemp("llama")
    make_random_llama(folder, "cuda:0", hidden=2048, layers=24, heads=16)
    gc.collect()
    torch.cuda.empty_cache()
    return folder


def test_a_job_samples_from_the_rounded_model_that_it_trains(model, tmp_path):
    kl = {}
    for in_4_bits in (False, True):
        (folder := tmp_path / str(in_4_bits)).mkdir()
        spec = {
            "model": {"path": str(model)},
            "lora": {"loadIn4Bit": in_4_bits},
            "training": {
                "promptsPerStep": 4,
                "numGenerations": 8,
                "maxSteps": STEPS,
                "maxCompletionLength": 64,
                "learningRate": 1e-4,
                "beta": 0.04,
            },
            "parallelism": {"gradientCheckpointing": True},
            "generation": SMALL_ENGINE,
        }
        rows = run_on_gpu(folder, EVEN | spec)
        assert len(rows) == STEPS
        assert all(row["grad_norm"] > 0 for row in rows)
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-3), "the reference is the rounded model"
        kl[in_4_bits] = max(row["trained/sampling/kl"] for row in rows)
    print(f"KL to the engine: {kl[True]:.2g} in 4 bits, {kl[False]:.2g} in 16")
    assert kl[True] < 3 * kl[False] + 1e-4


@pytest.fixture
def world():
    with only_world():
        yield


def test_weights_in_4_bits_take_a_quarter_of_the_memory_also_while_they_are_loaded(model, world):
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


def clean():
    """Free what is free; return the bytes that are not."""
    for _ in range(4):  # an earlier policy is held by garbage that goes in several collections
        gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def make_policy(model, *, in_4_bits):
    import fixed_samples  # reads the variables that `world` sets

    config = bare_settings(
        str(model),
        "bfloat16",
        training={"importanceSamplingCorrection": "none"},
        lora={"loadIn4Bit": in_4_bits},
        parallelism={"gradientCheckpointing": True},
    )
    return fixed_samples.make_policy(config, Device.CUDA), config.training


def timed_step(policy, training):
    """Take a step on random samples; return its seconds."""
    from fixed_samples import train_on

    random = torch.Generator().manual_seed(0)
    samples = []
    for index in range(16):
        prompt, answer = (tuple(torch.randint(3, 250, (512,), generator=random).tolist()) for _ in range(2))
        advantage = float(index % 2 * 2 - 1)
        samples.append(make_sample(prompt, answer, index=index, advantage=advantage, finish_reason="length"))
    torch.cuda.synchronize()
    start = time.perf_counter()
    train_on(policy, [samples], training)
    torch.cuda.synchronize()
    return time.perf_counter() - start
