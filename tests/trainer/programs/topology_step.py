"""Generate greedily, take a step on fixed samples, push, and generate again: topology_step.py CONTRACT OUT.

The contract gives the topology. OUT gets the ranks' results in rank order.
"""

# ruff: noqa: E402  # variables have to be set before the imports

import os
import sys
from pathlib import Path

from grpo_spec.contract import Contract, Device
from grpo_workload.ranks import environment

contract = Contract.model_validate_json(Path(sys.argv[1]).read_text())
environment.prepare(Device.CPU, os.environ)

import torch
from fixed_samples import train_on

from grpo_workload.algorithm.advantage import group_advantages
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.data.shard import shard
from grpo_workload.data.tokenizer import load_tokenizer
from grpo_workload.generation.build import build_generator
from grpo_workload.generation.servers import weight_sender
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather
from grpo_workload.weights import export

PROMPTS = tuple(tuple(range(first, first + 3 + 2 * index)) for index, first in enumerate((5, 110)))
# Several buckets and pieces in spite of the tiny model, so that one is gathered while another is sent.
export.GATHER_BYTES = 2**13
weight_sender.PIECE_BYTES["gloo"] = 2**14
rank, training = int(os.environ["RANK"]), contract.config.training


def drawn():
    """Yield the step's samples, with random tokens and rewards that are the same in every topology."""
    random = torch.Generator().manual_seed(11)
    prompts = [Prompt(index=index, text="", token_ids=ids) for index, ids in enumerate(PROMPTS)]
    rewards = torch.rand(len(prompts) * training.num_generations, generator=random).tolist()
    advantages = group_advantages(rewards, training.num_generations, training.scale_rewards)
    for position, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        length = int(torch.randint(1, training.max_completion_length + 1, (), generator=random))
        ids = tuple(torch.randint(3, 250, (length,), generator=random).tolist())
        completion = Completion(
            token_ids=ids, logprobs=(-5.0,) * length, text="", finish_reason="stop", weight_version=1
        )
        yield Sample(
            prompt=prompts[position // training.num_generations],
            completion=completion,
            reward=reward,
            advantage=advantage,
        )


def weights():
    return {name: weight.clone() for name, weight in policy.weights()}


def evaluated():
    """Return what this rank's share of the prompts is answered at another temperature; a rank may have none."""
    asked = [Prompt(index=index, text="", token_ids=PROMPTS[index], seed=20 + index) for index in shares[rank]]
    groups = generator.evaluate(asked, 2, 0.8)
    assert [len(group) for group in groups] == [2] * len(asked)
    return [(one.token_ids, one.weight_version) for part in gather(groups) for group in part for one in group]


def greedy():
    """Return completions of all prompts. Only rank 0 asks, for one at a time: the engine never has two sequences."""
    answers = []
    for index, token_ids in enumerate(PROMPTS):
        asked = [Prompt(index=index, text="", token_ids=token_ids)] if rank == 0 else []
        answers += [
            (one.token_ids, one.logprobs, one.weight_version) for group in generator.generate(asked, 1) for one in group
        ]
    generator.sleep()
    gather(None)
    generator.expect_weights()
    return answers


tokenizer = load_tokenizer(contract.config.model)
policy = Policy(
    contract.config, contract.device, timeout_seconds=contract.timeout_seconds, pad_token_id=tokenizer.pad_token_id
)
greedily = training.model_copy(update={"temperature": 0.0})
asking = contract.model_copy(update={"config": contract.config.model_copy(update={"training": greedily})})
generator = build_generator(asking, rank, policy, tokenizer)

shares = [shard(len(PROMPTS), contract.world_size, rank) for rank in range(contract.world_size)]
initial = weights()
generator.sync_weights(policy.weights(), 1)
evaluation = evaluated()
before = greedy()

owned = [
    list(drawn())[share.start * training.num_generations : share.stop * training.num_generations] for share in shares
]
metrics = train_on(policy, owned, training)

stepped = weights()
generator.sync_weights(policy.weights(), 2)
pushed = weights()
after = greedy()

is_untouched = all(torch.equal(stepped[name], pushed[name]) for name in stepped)
result = {
    "evaluation": evaluation,
    "before": before,
    "after": after,
    "metrics": metrics,
    "initial": initial,
    "weights": stepped,
    "is_untouched": is_untouched,
}
results = gather(result)
if rank == 0:
    torch.save(results, sys.argv[2])
generator.close()
