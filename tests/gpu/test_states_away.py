"""Optimizer states leave the GPU and return bitwise equal, from checkpoints too; prints freed memory and seconds."""

import gc

import pytest
import torch
from transformers import AutoTokenizer

from grpo_spec.contract import Device
from grpo_spec.optimizer import INT8_MOMENTS
from grpo_workload.capacity.states import num_parameters
from support.trainer.gpu_jobs import only_world
from support.trainer.random_llama import make_random_llama
from support.trainer.step_settings import bare_settings


@pytest.fixture(scope="module", autouse=True)
def world():
    with only_world():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 0.2 billion parameters in bfloat16."""
    folder = tmp_path_factory.mktemp("llama")
    make_random_llama(folder, "cpu", hidden=1024, layers=12, heads=16)
    return folder


def make_policy(model, stage, dtype, offload):
    import fixed_samples  # reads the variables that `world` sets

    config = bare_settings(
        str(model),
        "bfloat16",
        training={"learningRate": 1e-3, "importanceSamplingCorrection": "none"},
        parallelism={"zeroStage": stage, "offloadOptimizer": offload, "optimizerDtype": dtype},
    )
    return fixed_samples.make_policy(config, Device.CUDA), config


def in_use():
    """Bytes of the GPU in tensors of this process, in use by all processes, and kept by this process's allocator."""
    for _ in range(4):  # an earlier policy is held by garbage that goes in several collections
        gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free, torch.cuda.memory_reserved()


def bytes_that_leave(policy):
    """Bytes that offloading the states frees in tensors of this process, and in use by all processes; prints both."""
    before = in_use()
    with policy.with_states():
        with_states = in_use()
    after = in_use()
    assert after[0] == before[0], "the second offload should free as much as the first"
    gone, seconds = with_states[0] - after[0], policy._states.seconds
    print(
        f"ZeRO-{policy._config.parallelism.zero_stage}: {gone / 2**30:.3f} GiB leave; "
        f"in use with them {with_states[1] / 2**30:.2f} GiB, without {after[1] / 2**30:.2f} GiB "
        f"(kept by the allocator: {with_states[2] / 2**30:.2f} and {after[2] / 2**30:.2f}); "
        f"to the device and back in {seconds:.3f} s, {2 * gone / seconds / 1e9:.1f} GB/s"
    )
    return gone, with_states[1] - after[1]


def take(policy, step, config):
    """Take a step; returns its metrics without seconds, and the weights after it."""
    from fixed_samples import take_step

    metrics: dict[str, float] = take_step(policy, step, config.training)
    metrics.pop("time/offload", None)
    return metrics, {name: weight.cpu() for name, weight in policy.weights()}


def same(ours, expected):
    return ours[0] == expected[0] and all(torch.equal(ours[1][name], weight) for name, weight in expected[1].items())


@pytest.mark.parametrize(
    ("stage", "dtype", "size"),
    [
        (0, "float32", 12),
        (1, "float32", 12),
        (2, "bfloat16", 6),
        (3, "float32", 12),
        *((stage, "int8", 4 + INT8_MOMENTS) for stage in range(4)),
    ],
)
def test_offloaded_states_leave_the_gpu_between_steps_and_change_no_bit(model, stage, dtype, size):
    policy, config = make_policy(model, stage, dtype, "none")
    expected = [take(policy, step, config) for step in (0, 2, 3)]
    policy, config = make_policy(model, stage, dtype, "generating")
    steps = [take(policy, step, config) for step in (0, 2)]
    in_tensors, at_all = bytes_that_leave(policy)
    steps.append(take(policy, 3, config))
    assert all(map(same, steps, expected))
    states = size * num_parameters(policy.module.parameters())
    assert in_tensors == pytest.approx(states, rel=0.01)
    assert at_all > 0.8 * states, "other processes should get the freed memory"


@pytest.mark.parametrize(("dtype", "size"), [("float32", 12), ("int8", 4 + INT8_MOMENTS)])
def test_states_are_saved_from_the_host_and_leave_the_gpu_after_loading(model, tmp_path, dtype, size):
    import fixed_samples

    from grpo_workload.storage.checkpoint_content import SavedState
    from grpo_workload.storage.checkpoints import Checkpoints

    policy, config = make_policy(model, 2, dtype, "generating")
    take(policy, 0, config)
    checkpoints = Checkpoints(tmp_path, "run", keep=1, attempt=0, pod_uid="uid")
    state = SavedState(step=1, weight_version=1, num_tokens=0, world_size=1, zero_stage=2, optimizer_dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    checkpoints.save(policy, AutoTokenizer.from_pretrained(model), state)
    states = size * num_parameters(policy.module.parameters())
    assert torch.cuda.max_memory_allocated() - resting < 0.5 * states, "states were on the GPU during the save"
    expected = take(policy, 2, config)

    resumed, config = make_policy(model, 2, dtype, "generating")
    fixed_samples.resume(resumed, checkpoints, zero_stage=2, optimizer_dtype=dtype)
    assert bytes_that_leave(resumed)[0] == pytest.approx(states, rel=0.01)
    assert same(take(resumed, 2, config), expected)


@pytest.mark.parametrize("offload", ["none", "generating"])
def test_a_checkpoint_that_is_written_during_the_next_step_resumes_to_the_same_bits(model, tmp_path, offload):
    import fixed_samples

    from grpo_workload.storage.background import Background
    from grpo_workload.storage.checkpoint_content import SavedState
    from grpo_workload.storage.checkpoints import Checkpoints

    policy, config = make_policy(model, 2, "float32", offload)
    take(policy, 0, config)
    checkpoints = Checkpoints(tmp_path, "run", keep=1, attempt=0, pod_uid="uid")
    state = SavedState(step=1, weight_version=1, num_tokens=0, world_size=1, zero_stage=2)
    background = Background(policy.device)
    assert background.staging.reserve(checkpoints.num_bytes(policy)) is None
    tokenizer = AutoTokenizer.from_pretrained(model)
    pending = checkpoints.begin(policy, tokenizer, state, background=background)
    expected = take(policy, 2, config)
    pending.publish()
    background.end()

    resumed, config = make_policy(model, 2, "float32", offload)
    fixed_samples.resume(resumed, checkpoints, zero_stage=2)
    assert same(take(resumed, 2, config), expected)
