"""The KL divergence from the reference model as a part of completions' rewards (`klInReward`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.micro_batch import filler, micro_batch
from grpo_workload.algorithm.packing import pack
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.policy.memory.memory_error import explained_memory
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather


def divergences(
    policy: Policy, completions: Sequence[tuple[Prompt, Completion]], training: TrainingConfig
) -> list[float]:
    """Return `Policy.divergence` of each of this rank's completions, in nats; NaN where it is not finite, or lost.

    Collective: under ZeRO-3 all ranks run the models equally often, those with fewer completions on fillers. The ranks
    of a sequence group run them on the completions of all of these.
    """
    mine = [Sample(prompt=prompt, completion=one, reward=0.0, advantage=0.0) for prompt, one in completions]
    by_rank, own_place = [mine], 0
    if policy.group is not None:
        by_rank, own_place = gather([one.bare() for one in mine], policy.group.handle), policy.group.place
    samples = [*chain(*by_rank)]
    there = [
        (place, number, tokens)
        for place, one in enumerate(samples)
        if not one.completion.is_lost
        for number, tokens in enumerate(one.completion.num_read(one.prompt))
    ]
    lengths = [tokens for *_, tokens in there]
    max_sequences = training.per_device_train_batch_size or max(1, len(there))
    bins = pack(lengths, max_tokens=training.micro_batch_tokens, max_sequences=max_sequences)
    found = [math.nan if one.completion.is_lost else 0.0 for one in samples]
    for own in [*bins, *[[]] * (max(gather(len(bins))) - len(bins))]:
        places = [there[index][0] for index in own]
        batch = micro_batch([samples[there[index][0]].sequence(there[index][1]) for index in own]) if own else filler()
        with explained_memory(batch):
            values = policy.divergence(batch, training.temperature).tolist()
        for place, value in zip(places, values, strict=False):
            found[place] += value if math.isfinite(value) else math.nan
    first = sum(map(len, by_rank[:own_place]))
    return found[first : first + len(mine)]
