"""Generate greedily, take a step on fixed samples, push, and generate again: topology_step.py CONTRACT OUT.

The contract gives the topology. OUT gets the ranks' results in rank order.
"""

import os
import sys
from pathlib import Path

import torch
from fixed_samples import make_policy, train_on

from grpo_spec.contract import Contract
from grpo_workload.algorithm.advantage import group_advantages
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.data.shard import shard
from grpo_workload.data.tokenizer import load_tokenizer
from grpo_workload.generation.build import build_generator
from grpo_workload.generation.servers import weight_sender
from grpo_workload.ranks.collectives import gather
from grpo_workload.weights import export
from support.trainer.samples import make_sample

PROMPTS = tuple(tuple(range(first, first + 3 + 2 * index)) for index, first in enumerate((5, 110)))
# Several buckets and pieces in spite of the tiny model, so that one is gathered while another is sent.
export.GATHER_BYTES = 2**13
weight_sender.PIECE_BYTES["gloo"] = 2**14
contract = Contract.model_validate_json(Path(sys.argv[1]).read_text())
rank, training = int(os.environ["RANK"]), contract.config.training


def drawn():
    """Yield the step's samples, with random tokens and rewards that are the same in every topology."""
    random = torch.Generator().manual_seed(11)
    rewards = torch.rand(len(PROMPTS) * training.num_generations, generator=random).tolist()
    advantages = group_advantages(rewards, training.num_generations, training.scale_rewards)
    for position, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        length = int(torch.randint(1, training.max_completion_length + 1, (), generator=random))
        ids, index = torch.randint(3, 250, (length,), generator=random).tolist(), position // training.num_generations
        yield make_sample(PROMPTS[index], ids, index=index, reward=reward, advantage=advantage)


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
policy = make_policy(contract.config)
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
