"""Prompts of later steps, sampled ahead and cut by pushes; programs import this after `environment.prepare`."""

from contextlib import contextmanager

import torch

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.samples import Prompt, Sample
from support.trainer.listeners import Heard

# So small a batch that requests begin one after the other.
ENGINE_ARGS = {"max_num_batched_tokens": 128}
ROOM = (6, 9, 20)
"""Tokens that the engine's longest sequence leaves for completions of each step: later ones are cut in between."""


def sample_ahead(policy, generator, rank, temperature, version, max_model_len):
    """Sample three steps, of which the last two begin with the first; push the same weights, then others.

    Returns:
        steps: prompts and completions of each step.
        before, after: |policy - engine| of each token of each completion of the three steps, with the policy before
            the last push, and after it.
    """

    def push(version):
        generator.sleep()
        generator.sync_weights(policy.weights(), version)

    def prompt(step, place, room):
        ids = tuple(range(10 + place, 10 + place + max_model_len - room))
        return Prompt(index=step, text="", token_ids=ids, seed=100 * step + 10 * rank + place)

    asked = [[prompt(step, place, room) for place in range(1 + (rank + step) % 2)] for step, room in enumerate(ROOM)]
    listeners = [Heard() for _ in asked]
    push(version)
    for step in (1, 2):
        generator.begin(asked[step], 4, listeners[step])
    steps = [(asked[0], generator.generate(asked[0], 4, listeners[0]))]
    push(version + 1)
    # Between steps, while completions of later ones are cut: it has its own, and changes none of theirs.
    evaluated = [one for group in generator.evaluate(asked[0], 2, 0.5) for one in group]
    assert [one.weight_version for one in evaluated] == [version + 1] * 2 * len(asked[0])
    steps.append((asked[1], generator.generate(asked[1], 4, late := Heard())))
    assert (late.moves > 0, late.groups) == (True, {})
    with scaled(policy, 1.5):
        push(version + 2)
        steps.append((asked[2], generator.generate(asked[2], 4)))
        after = [differences(policy, prompts, groups, temperature) for prompts, groups in steps]
    for listener, (_, groups) in zip(listeners, steps, strict=True):
        assert listener.groups == dict(enumerate(groups))
    before = [differences(policy, prompts, groups, temperature) for prompts, groups in steps]
    return {"steps": steps, "before": before, "after": after}


@contextmanager
def scaled(policy, factor):
    """Multiply the policy's weights by `factor`, and restore them."""
    parameters = list(policy.module.parameters())
    kept = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.mul_(factor)
    yield
    for parameter, before in zip(parameters, kept, strict=True):
        parameter.data.copy_(before)


def samples_of(prompts, groups):
    """Return the samples of the prompts' completions, which nothing rewards."""
    return [
        Sample(prompt=prompt, completion=completion, reward=0.0, advantage=0.0)
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]


def differences(policy, prompts, groups, temperature):
    """Return the differences between log-probabilities of the policy and of the engine: a list for each completion."""
    batch = micro_batch(samples_of(prompts, groups))
    with torch.no_grad():
        logprobs_BT = policy.head.per_token(policy.deepspeed_engine, batch, temperature).logprobs_BT
    found = (logprobs_BT - batch.sampling_logprobs_BC).abs()
    return [row[is_token].tolist() for row, is_token in zip(found, batch.is_token_BC, strict=True)]
