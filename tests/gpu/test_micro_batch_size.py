"""Micro-batches of the size that a rank chooses fit into the GPU's memory and use it; prints what was chosen and taken.

Also in a whole colocated job, whose engine sleeps meanwhile.
"""

import gc
import time

import pytest
import torch

from grpo_spec.contract import Device
from grpo_spec.training import MICRO_BATCH_TOKENS
from grpo_workload.algorithm.loss import LossScale
from support.trainer.gpu_jobs import only_world, run_on_gpu
from support.trainer.random_llama import make_random_llama
from support.trainer.step_settings import bare_settings

GIB = 2**30
ROOM = 4 * GIB
LENGTH = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 0.4 billion parameters in bfloat16."""
    folder = tmp_path_factory.mktemp("llama")
    make_random_llama(folder, "cpu", hidden=1024, layers=24, heads=16)
    return folder


@pytest.fixture(scope="module")
def only_rank():
    with only_world():
        yield


def make_policy(model, parallelism, lora):
    import fixed_samples  # reads the variables that `only_rank` sets

    config = bare_settings(
        str(model),
        "bfloat16",
        training={"maxCompletionLength": LENGTH, "importanceSamplingCorrection": "none"},
        parallelism={"gradientCheckpointing": True, **parallelism},
        lora=lora,
    )
    return fixed_samples.make_policy(config, Device.CUDA)


@pytest.mark.vllm
def test_a_colocated_job_trains_a_step_in_one_micro_batch(model, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Write."}\n' * 8)
    spec = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "dataset": {"path": str(tmp_path / "rows.jsonl"), "dataloaderNumWorkers": 0},
        "rewards": [{"name": "tokens", "function": "token_reward:even_tokens"}],
        "training": {"maxSteps": 3, "promptsPerStep": 8, "numGenerations": 16, "maxCompletionLength": LENGTH},
        "parallelism": {"zeroStage": 0, "optimizerDtype": "bfloat16", "gradientCheckpointing": True},
        "generation": {"maxModelLen": LENGTH + 100, "engineArgs": {"enforce_eager": True}},
    }
    rows = run_on_gpu(tmp_path, spec)
    print([(row["max_tokens_per_micro_batch"], row["ranks/trained_tokens/max"], row["time/train"]) for row in rows])
    assert [row["skipped"] for row in rows] == [0, 0, 0]
    # 8 x 16 completions of at most LENGTH + 100 tokens with their prompts: 64,000, more than one needs.
    assert all(row["max_tokens_per_micro_batch"] > 4 * MICRO_BATCH_TOKENS for row in rows)


@pytest.mark.parametrize(
    ("parallelism", "lora"),
    [
        ({"zeroStage": 0, "optimizerDtype": "bfloat16"}, None),
        ({"zeroStage": 2}, None),
        ({"zeroStage": 3}, None),
        ({"zeroStage": 0, "optimizerDtype": "bfloat16", "offloadActivations": True}, {"r": 16}),
    ],
)
def test_what_is_chosen_fits_and_uses_the_memory(only_rank, model, parallelism, lora):
    policy = make_policy(model, parallelism, lora)
    from grpo_workload.policy.trials.memory_trial import (
        SPARE,
        CudaMemory,
        TooLongError,
        longest_sample,
        random_batch,
        try_memory,
    )

    for _ in range(4):  # an earlier policy is held by garbage that goes in several collections
        gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    trained = sum(weight.numel() for weight in policy.module.parameters() if weight.requires_grad)
    # AdamW's moments, which the first step allocates, beside gradients.
    grown = 2 * (2 if "optimizerDtype" in parallelism else 4) * trained
    ballast = torch.empty(int(free - SPARE * total - ROOM - 2 * grown), dtype=torch.uint8, device="cuda")

    start = time.monotonic()
    longest = longest_sample(policy, LENGTH, LENGTH - 1, None)
    choice = try_memory(policy, CudaMemory(policy), longest, most=10**6, fixed=None, halvings=0)
    seconds = time.monotonic() - start
    again = try_memory(policy, CudaMemory(policy), longest, most=10**6, fixed=None, halvings=0)
    assert again.tokens == pytest.approx(choice.tokens, rel=0.1)

    taken = []
    for _ in range(2):  # the first allocates the optimizer's moments
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        batches = [random_batch(policy, choice.tokens, LENGTH) for _ in range(3)]
        scale = LossScale(num_sequences=3, num_tokens=3 * choice.tokens)
        assert policy.step(batches, 3, scale)["skipped"] == 0
        taken.append(torch.cuda.max_memory_reserved() - before)
    gradients = 2 * trained
    print(
        f"{parallelism}, lora {lora}: micro-batches of {choice.tokens} tokens, chosen in {seconds:.1f} s from "
        f"{choice.room / GIB:.2f} GiB; steps took {[round(one / GIB, 2) for one in taken]} GiB with gradients of at "
        f"most {2 * gradients / GIB:.2f} GiB"
    )
    # Four times as much as fits: the trial says so, with what it takes by the passes before.
    too_long = longest_sample(policy, 4 * choice.tokens, LENGTH, None)
    with pytest.raises(TooLongError) as refused:
        try_memory(policy, CudaMemory(policy), too_long, most=10**6, fixed=None, halvings=0)
    print(f"{4 * choice.tokens} tokens: {refused.value}")
    assert refused.value.needed > refused.value.free > choice.room / 2
    del ballast
    assert choice.tokens > MICRO_BATCH_TOKENS
    assert 0.7 * choice.room < taken[1] < choice.room + 2 * gradients + SPARE * total / 2
