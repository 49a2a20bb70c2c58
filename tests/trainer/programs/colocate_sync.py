"""Two steps with a colocated vLLM, then more completions.

colocate_sync.py MODEL OUT ZERO_STAGE TENSOR_PARALLEL TRAINS DTYPE STALENESS; TRAINS is "all", "adapters", or "4bit" for
adapters of a model in 4 bits. OUT gets the ranks' results in rank order: among them the differences between
log-probabilities of the engine and of the trained and the initial model, their ratios under truncated and penalised
sampling, and what is said of weights that differ. With a `training.maxStaleness` over 0, also what is sampled ahead.
"""

import os
import sys
from unittest import mock

import torch
from fixed_samples import make_policy, train_on
from results import error_of
from sampled_ahead import ENGINE_ARGS, sample_ahead, samples_of
from transformers import AutoTokenizer

from grpo_spec.contract import Device
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.samples import Prompt, Sample
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.generation import own_engine
from grpo_workload.generation.colocate import ColocateGenerator
from grpo_workload.generation.vllm_api import sampling_parameters, whole_text
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model.load import load_model
from grpo_workload.ranks.collectives import gather
from grpo_workload.training.weight_check import WeightCheck
from grpo_workload.weights import export
from grpo_workload.weights.differ import WeightsAlteredError
from support.trainer.corrupt import CHANGES, changing
from support.trainer.listeners import Heard
from support.trainer.step_settings import bare_settings
from support.trainer.stops import are_stopped, word_in

NUM_GENERATIONS, LENGTH, TEMPERATURE = 4, 12, 0.7
LONG = tuple(3 + 7 * place % 250 for place in range(300))
"""The beginning of a prompt, longer than two blocks of vLLM's prefix cache, which have 128 tokens on CPUs: what old
weights made of it may not be used after a push."""
# Buckets end inside fused layers (q, k and v; gate and up), of which vLLM keeps the first parts until the rest arrives.
export.GATHER_BYTES = 2**12


TRUNCATED = (
    {"top_p": 0.7},
    {"top_k": 20},
    {"min_p": 0.05, "top_k": 100, "top_p": 0.9},
    {"top_k": 20, "repetition_penalty": 1.3},
)
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": -2.0, "frequency_penalty": 0.5}  # tokens come again
CUT_PENALISED = {"repetition_penalty": 0.7}  # where completions may be cut, the spec refuses the others


def truncated_ratios(policy, generator, prompts, training):
    """Sample under the truncations and penalties of `training`.

    Return the mean ratio policy / engine over all tokens, the same if the trainer knew of neither, the largest
    |log ratio|, and that if the trainer knew of neither.
    """
    generator._sampling |= sampling_parameters(training)
    batch = micro_batch(samples_of(prompts, generator.generate(prompts, 32)))
    with torch.no_grad():
        known = policy.head.per_token(
            policy.deepspeed_engine, batch, TEMPERATURE, Truncation.of(training), Penalties.of(training)
        )
    logs, whole_logs = (
        (logprobs_BT - batch.sampling_logprobs_BC)[batch.is_token_BC]
        for logprobs_BT in (known.logprobs_BT, known.whole_logprobs_BT)
    )
    both = logs, whole_logs
    return [float(one.exp().mean()) for one in both] + [float(one.abs().max()) for one in both]


def stops(generator, prompts, training):
    """Whether completions end at a text that they have, which is the same on all ranks: they may share an engine.

    Where one is looked for, vLLM makes the texts, which must be those of whole completions.
    """

    def generate():
        return [one for group in generator.generate(prompts, NUM_GENERATIONS) for one in group]

    whole, usual = gather(generate()), generator._sampling
    word = word_in(whole[0])
    generator._sampling = usual | sampling_parameters(training.model_copy(update={"stop": (word,)}))
    stopped = gather(generate())
    generator._sampling |= sampling_parameters(training.model_copy(update={"stop": ("not sampled" * LENGTH,)}))
    assert gather(generate()) == whole
    generator._sampling = usual
    return are_stopped([one for own in whole for one in own], [one for own in stopped for one in own], word)


def differences(model, head, samples):
    """Return the largest difference between log-probabilities of a model and of the engine, over all tokens."""
    batch = micro_batch(samples)
    with torch.no_grad():
        logprobs_BT = head.per_token(model, batch, TEMPERATURE).logprobs_BT
    return float(((logprobs_BT - batch.sampling_logprobs_BC) * batch.mask_BC).abs().max())


def text_of(tokenizer, prompt, completion):
    """Return the text that the generator must give to a completion."""
    is_stopped = completion.finish_reason == "stop"
    return whole_text(tokenizer, prompt.token_ids, completion.token_ids, is_stopped=is_stopped)


def complaints(policy, generator, check):
    """Return what is said of weights that change on their way, of an engine with other ones, and of missing ones."""
    generator.sync_weights(policy.weights(), 3)  # it was asleep
    changed = next(spec.name for spec in policy.weights().specs if len(spec.shape) > 1 and ".1." in spec.name)
    for how in CHANGES:
        with mock.patch.object(own_engine, "with_sums", changing(changed, how)):
            kind, said = error_of(generator.sync_weights, policy.weights(), 3)
            assert kind == WeightsAlteredError.__name__
            assert f"weights altered: {changed} changed between the trainer" in said
    generator.sync_weights(policy.weights(), 3)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.is_floating_point():
                parameter.data.mul_(1.5)
    return (
        error_of(check.run, policy, generator, 3),
        error_of(generator.sync_weights, policy.weights(), 0),
        error_of(generator.sync_weights, [one for one in policy.weights() if ".1." not in one[0]], 4),
    )


def main(model, out, zero_stage, tensor_parallel, trains, dtype, staleness):
    rank = int(os.environ["RANK"])
    beginning = LONG if trains == "4bit" else ()  # one case is enough: it takes longer
    max_model_len = 64 + len(beginning)
    config = bare_settings(
        model,
        dtype,
        training={
            "learningRate": 1e-3,
            "lrSchedulerType": "constant",
            "maxCompletionLength": LENGTH,
            "temperature": TEMPERATURE,
            "perDeviceTrainBatchSize": 4,
            "maxStaleness": staleness,
        },
        parallelism={"zeroStage": zero_stage},
        **{} if trains == "all" else {"lora": {"modulesToSave": ["norm"], "loadIn4Bit": trains == "4bit"}},
        generation={
            "tensorParallel": tensor_parallel,
            "maxModelLen": max_model_len,
            "kvCacheMemory": "64Mi",
            "engineArgs": {"enforce_eager": True} | (ENGINE_ARGS if staleness else {}),
        },
    )
    policy = make_policy(config)
    initial = load_model(config, torch.device("cpu")) if zero_stage < 3 else None
    generator = ColocateGenerator(config, Device.CPU)
    tokenizer = AutoTokenizer.from_pretrained(model)
    check = WeightCheck(config, tokenizer)
    generator.sync_weights(policy.weights(), 0)  # the weights that the engine has loaded
    check.run(policy, generator, 0)
    prompts = [
        Prompt(index=index, text="", token_ids=(*beginning, *range(10 + rank, 20 + 2 * index)), seed=index)
        for index in range(1 + rank)
    ]

    def generate():
        groups = generator.generate(prompts, NUM_GENERATIONS, heard := Heard())
        assert heard.groups == dict(enumerate(groups))
        assert heard.moves >= max(len(completion.token_ids) for group in groups for completion in group)
        generator.sleep()
        for prompt, group in zip(prompts, groups, strict=True):
            rewards = [sum(token % 2 == 0 for token in one.token_ids) / len(one.token_ids) for one in group]
            spreads.append(max(rewards) - min(rewards))
            for completion, reward in zip(group, rewards, strict=True):
                advantage = reward - sum(rewards) / len(rewards)
                yield Sample(prompt=prompt, completion=completion, reward=reward, advantage=advantage)

    logged = []
    spreads: list[float] = []
    for step in range(2):
        metrics = train_on(policy, gather(list(generate())), config.training)
        logged.append(metrics["trained/sampling/sampling_logp_difference/max"])
        generator.sync_weights(policy.weights(), step + 1)
        check.run(policy, generator, step + 1)
    # One prompt among different ones on every rank.
    common = Prompt(index=9, text="", token_ids=(5, 6, 7), seed=11)
    *_, answers = generator.generate([*reversed(prompts), common], NUM_GENERATIONS)
    *truncated, penalised = (
        truncated_ratios(policy, generator, prompts, config.training.model_copy(update=options))
        for options in (*TRUNCATED, CUT_PENALISED if staleness else PENALISED)
    )
    generator._sampling |= sampling_parameters(config.training)
    is_stopped = None if staleness else stops(generator, prompts, config.training)
    samples = list(generate())
    ahead = sample_ahead(policy, generator, rank, TEMPERATURE, 3, max_model_len) if staleness else None
    result = {
        "ahead": ahead,
        "texts": [sample.completion.text for sample in samples],
        "whole_texts": [text_of(tokenizer, sample.prompt, sample.completion) for sample in samples],
        "truncated": truncated,
        "penalised": penalised,
        "is_stopped": is_stopped,
        "logged": logged,
        "spreads": spreads,
        "tokens": [sample.completion.token_ids for sample in samples],
        "common": [answer.token_ids for answer in answers],
        "versions": [sample.completion.weight_version for sample in samples],
        "trained": differences(policy.deepspeed_engine, policy.head, samples),
        "initial": differences(initial, LogprobHead(initial), samples) if initial is not None else None,
        "logprobs": [logprob for sample in samples for logprob in sample.completion.logprobs],
    }
    results = gather(result | {"complaints": complaints(policy, generator, check)})
    if rank == 0:
        torch.save(results, out)
    generator.close()


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6], int(sys.argv[7]))
