"""Sleep level 2 frees memory, generation without weights is refused, and a full push restores every tensor.

Completions that sleep cuts (`training.maxStaleness`) continue after the push.

Under top-p, top-k and min-p, trainer and engine give the same log-probabilities to what was sampled.
"""

import math

import pytest
import torch

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.generation.vllm_api import sampling_parameters
from grpo_workload.policy.logprobs.head import LogprobHead
from support.trainer.engines import change, differences, prompts, weights_of
from support.trainer.gpu_jobs import colocated_engine
from support.trainer.random_llama import make_random_llama, mean_difference

pytestmark = pytest.mark.vllm

PROMPT_LIST = prompts()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 0.4 billion parameters in bfloat16; its name is its folder."""
    return make_random_llama(tmp_path_factory.mktemp("llama"), "cuda:0", hidden=1024, layers=24, heads=16)


@pytest.fixture(scope="module")
def generator(model):
    ready = colocated_engine(model)
    ready._sampling["temperature"] = 0.0  # greedily, which no job can ask for
    yield ready
    ready.close()


def memory_in_use():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def contents(generator):
    """Every parameter and buffer of the engine's model, copied to the host."""

    def copy(worker):
        module = worker.get_model()
        named = [*module.named_parameters(), *module.named_buffers()]
        return {name: tensor.detach().cpu().clone() for name, tensor in named}

    (held,) = generator._llm.collective_rpc(copy)
    assert any("rotary" in name for name in held), "the model has no buffers that sleep could lose"
    return held


def tokens(generator):
    groups: list[list[Completion]] = generator.generate(PROMPT_LIST, 1)
    return [one.token_ids for group in groups for one in group]


def test_sleep_frees_memory_and_a_push_restores_everything(model, generator):
    before, answers, awake = contents(generator), tokens(generator), memory_in_use()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    generator.sleep()
    asleep = memory_in_use()
    assert awake - asleep > weights + 2 * 2**30 - 2**28, f"freed {(awake - asleep) / 2**30:.2f} GiB"
    with pytest.raises(RuntimeError, match="full push"):
        generator.generate(PROMPT_LIST, 1)

    generator.sync_weights(weights_of(model), 1)
    after = contents(generator)
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert tokens(generator) == answers
    print(f"in use awake {awake / 2**30:.2f} GiB, asleep {asleep / 2**30:.2f} GiB, {len(before)} tensors equal")


def test_after_sleep_the_engine_samples_from_the_pushed_weights(model, generator):
    assert mean_difference(model, generator, PROMPT_LIST, 1) < 0.05
    generator.sleep()
    change(model)
    generator.sync_weights(weights_of(model), 3)
    fresh = mean_difference(model, generator, PROMPT_LIST, 1)
    assert math.isfinite(fresh)
    assert fresh < 0.05


def test_completions_that_sleep_cuts_continue_after_a_push(model, generator, monkeypatch):
    """On GPUs vLLM schedules a batch ahead, which is in flight when requests are cut."""
    from grpo_workload.generation.ahead import AheadSampler

    sampling = generator._sampling | {"temperature": 1.0}
    monkeypatch.setattr(generator, "_ahead", AheadSampler(generator._llm, sampling, generator._gather, 0))
    generator.begin(PROMPT_LIST, 8)
    for version in (generator._version + 1, generator._version + 2):
        room_for_6 = Prompt(index=9, text="", token_ids=tuple(range(3, 125)), seed=version)
        ((first,),) = generator.generate([room_for_6], 1)
        assert len(first.token_ids) <= 6
        generator.sleep()
        generator.sync_weights(weights_of(model), version)
    groups = generator.generate(PROMPT_LIST, 8)
    completions = [one for group in groups for one in group]
    print(f"{[(len(one.token_ids), one.weight_version, one.weight_updates) for one in completions]}")
    assert differences(model, PROMPT_LIST, groups).mean() < 0.05
    assert all(len(one.token_ids) == 16 or one.finish_reason == "stop" for one in completions)
    assert max(one.weight_updates for one in completions) == 2


@pytest.mark.parametrize(
    "options", [{"top_p": 0.7}, {"top_k": 20}, {"min_p": 0.05, "top_k": 100, "top_p": 0.9}], ids=str
)
def test_what_the_engine_leaves_out_of_sampling_the_trainer_leaves_out_too(model, generator, options):
    """The mean ratio of trainer and engine is 1, in bfloat16 and on vLLM's kernels for GPUs."""
    training = TrainingConfig(max_completion_length=16, **options)
    before, generator._sampling = generator._sampling, generator._sampling | sampling_parameters(training)
    groups = generator.generate(PROMPT_LIST, 64)
    generator._sampling = before
    head, logs, whole_logs = LogprobHead(model), [], []
    for prompt, group in zip(PROMPT_LIST, groups, strict=True):
        for completion in group:
            batch = micro_batch([Sample(prompt=prompt, completion=completion, reward=0.0, advantage=0.0)]).to("cuda")
            with torch.no_grad():
                known = head.per_token(model, batch, training.temperature, Truncation.of(training))
            logs.append((known.logprobs_BT - batch.sampling_logprobs_BC).flatten())
            whole_logs.append((known.whole_logprobs_BT - batch.sampling_logprobs_BC).flatten())
    log_ratios = torch.cat(logs)
    mean, without = float(log_ratios.exp().mean()), float(torch.cat(whole_logs).exp().mean())
    print(f"{options}: mean ratio {mean:.4f}, largest |log ratio| {float(log_ratios.abs().max()):.3f}; {without:.3f}")
    assert abs(mean - 1) < 0.01
    assert without < 0.95, "a trainer that knows of no truncation must be noticed"
