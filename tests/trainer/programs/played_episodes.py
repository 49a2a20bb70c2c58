"""Episodes on a colocated vLLM: played_episodes.py MODEL OUT TENSOR_PARALLEL STALENESS.

OUT gets for each rank what each step's episodes are, |policy - engine| of each own token, and the turns that vLLM
itself samples for the same tokens (None where another push has cut them).
"""

import os
import sys

import torch
from fixed_samples import make_policy
from vllm import SamplingParams

from grpo_spec.contract import Device
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.samples import Prompt, Sample
from grpo_workload.generation.colocate import ColocateGenerator
from grpo_workload.generation.own_answers import bare
from grpo_workload.generation.vllm_api import engine_prompt
from grpo_workload.ranks.collectives import gather
from grpo_workload.ranks.seeds import sample_seed
from support.trainer.listeners import Heard
from support.trainer.scripted_episodes import ENDS, scripted_episodes, turns_of
from support.trainer.step_settings import bare_settings

NUM_GENERATIONS, LENGTH, TEMPERATURE = 4, 40, 0.7


def asked_again(generator, prompt, number, completion):
    """Return what vLLM samples for the tokens before each turn, which the engine's ranks ask for together."""
    if completion.weight_updates:
        return None
    prompt_ids, found = completion.prompt_ids(prompt), []
    for start, _ in turns_of(completion):
        own = generator._sampling | bare(generator._sampling)
        parameters = own | {"seed": sample_seed(prompt.seed, number, start), "max_tokens": LENGTH - start}
        asked = [*prompt_ids, *completion.token_ids[:start]]
        (output,) = generator._llm.generate([engine_prompt(asked)], [SamplingParams(**parameters)], use_tqdm=False)
        found.append(tuple(output.outputs[0].token_ids))
    return found


def differences(policy, prompt, completion):
    """Return |policy - engine| of each of its own tokens."""
    batch = micro_batch([Sample(prompt=prompt, completion=completion, reward=0.0, advantage=0.0)])
    with torch.no_grad():
        logprobs_BT = policy.head.per_token(policy.deepspeed_engine, batch, TEMPERATURE).logprobs_BT
    found = (logprobs_BT - batch.sampling_logprobs_BC).abs()
    return found[batch.mask_BC.bool()].tolist()


def main(model, out, tensor_parallel, staleness):
    rank = int(os.environ["RANK"])
    config = bare_settings(
        model,
        "float32",
        tools=[{"function": "unused:tool"}],
        training={"maxCompletionLength": LENGTH, "temperature": TEMPERATURE, "maxStaleness": staleness},
        generation={
            "tensorParallel": tensor_parallel,
            "maxModelLen": 128,
            "kvCacheMemory": "64Mi",
            "engineArgs": {"enforce_eager": True, "max_num_batched_tokens": 128},
        },
    )
    policy = make_policy(config)
    generator = ColocateGenerator(config, Device.CPU, scripted_episodes(LENGTH, 80))
    generator._sampling |= ENDS
    generator.sync_weights(policy.weights(), 0)
    asked = [
        [
            Prompt(
                index=step,
                text="",
                token_ids=tuple(range(10 + place, 20 + place)),
                seed=100 * step + 10 * rank + place,
                columns={"seconds": 0.5 if step else 0.0},  # later steps are in calls when the first is complete
            )
            for place in range(1 + (rank + step) % 2)
        ]
        for step in range(3)
    ]
    steps = []
    for step, prompts in enumerate(asked):
        if staleness and step == 0:
            for later in (1, 2):
                generator.begin(asked[later], NUM_GENERATIONS, Heard())
        heard = Heard()
        groups = generator.generate(prompts, NUM_GENERATIONS, heard)
        assert staleness or heard.groups == dict(enumerate(groups))
        generator.sleep()
        generator.sync_weights(policy.weights(), step + 1)
        greedy = [generator.evaluate(prompts, 2, 0.0, Heard()) for _ in range(2)]
        assert greedy[0] == greedy[1]
        steps.append(
            [(p, number, one) for p, group in zip(prompts, groups, strict=True) for number, one in enumerate(group)]
        )
    everything = gather([one for step in steps for one in step])
    # Ranks that share an engine ask together, so each asks for what all have.
    again = {
        (prompt.seed, number): asked_again(generator, prompt, number, completion)
        for own in everything
        for prompt, number, completion in own
    }
    result = [
        {
            "completion": completion,
            "turns": turns_of(completion),
            "again": again[prompt.seed, number],
            "differences": differences(policy, prompt, completion),
        }
        for step in steps
        for prompt, number, completion in step
    ]
    results = gather(result)
    if rank == 0:
        torch.save(results, out)
    generator.close()


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
