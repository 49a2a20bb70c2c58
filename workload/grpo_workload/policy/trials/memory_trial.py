"""Chooses how many tokens a micro-batch may hold, by passes of growing size on the policy itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from grpo_workload.algorithm.micro_batch import MicroBatch, filler, micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.token_budget import NUM_PASSES, Pass, largest, next_pass
from grpo_workload.policy.memory.optimizer_offload import adam
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather

logger = logging.getLogger(__name__)

GIB = 2**30
SPARE = 0.1
"""Share of a GPU that stays free: for fragments, NCCL's buffers, and what long completions among short ones take."""


class Memory(Protocol):
    """The memory of a rank's device."""

    def begin(self) -> int:
        """Begin a pass; returns the bytes that it may take."""
        ...

    def peak(self) -> int:
        """Return the bytes that the pass took at its peak."""
        ...


class CudaMemory:
    """Memory of a GPU, by what torch reserves in it: with fragments, and without a sleeping engine's addresses."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._reserved = policy, 0

    def begin(self) -> int:
        """See `Memory.begin`. What is cached, and what the optimizer's first step will allocate, is accounted for."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._reserved = torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        return int(free - SPARE * total) - _missing_moments(self._policy)

    def peak(self) -> int:
        """See `Memory.peak`."""
        return torch.cuda.max_memory_reserved() - self._reserved


class Choice(NamedTuple):
    """What a trial has found, the same on every rank."""

    tokens: int  # of a micro-batch, at most
    room: int  # bytes that a pass may take: the least of all ranks


def choose_tokens(policy: Policy, memory: Memory, *, most: int, length: int, halvings: int) -> Choice:
    """Return how many tokens a micro-batch may hold; collective.

    The passes are those of one step, whose gradients are dropped: the first, over two tokens, allocates what all steps
    allocate once, and gradients. See `Policy.rehearse` for what stays as it is.

    Args:
        policy: the policy, with engines on its device in the state in which they are while it trains.
        memory: of this rank's device.
        most: the largest number of tokens of use.
        length: tokens of a sequence of prompt and completion, at most.
        halvings: how often the number is halved, since larger micro-batches ran out of memory.

    Raises:
        MicroBatchMemoryError: a pass ran out of memory all the same.
    """
    passes: list[Pass] = []
    rooms: list[int] = []

    def batches() -> Iterator[MicroBatch]:
        yield filler()
        for _ in range(NUM_PASSES):
            rooms.append(min(gather(memory.begin())))
            tokens = next_pass(passes, rooms[-1], max(1, most >> halvings))
            if not tokens:
                yield filler()
                continue
            yield random_batch(policy, tokens, length)
            passes.append(Pass(tokens, max(gather(memory.peak()))))

    policy.rehearse(batches(), 1 + NUM_PASSES)
    choice = Choice(max(1, min(most, largest(passes, rooms[-1])) >> halvings), rooms[-1])
    for one in passes:
        logger.info("a micro-batch of %d tokens takes %.2f GiB", one.tokens, one.memory / GIB)
    return choice


def random_batch(policy: Policy, tokens: int, length: int) -> MicroBatch:
    """Make a micro-batch of random sequences of `length` tokens, whose first is the prompt."""
    vocabulary = policy.module.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (max(2, tokens),), generator=torch.Generator().manual_seed(0)).tolist()
    parts = [ids[start : start + length] for start in range(0, len(ids), length)]
    batch = micro_batch([_sample(part) for part in parts if len(part) > 1])
    if (replay := policy.head.replay) is None:
        return batch
    return replace(batch, experts_NLX=replay.own_choice(batch.num_tokens))


def _sample(ids: list[int]) -> Sample:
    answer = Completion(
        token_ids=tuple(ids[1:]), logprobs=(0.0,) * (len(ids) - 1), text="", finish_reason="stop", weight_version=0
    )
    prompt = Prompt(index=-1, text="", token_ids=tuple(ids[:1]))
    return Sample(prompt=prompt, completion=answer, reward=0.0, advantage=1.0)


def _missing_moments(policy: Policy) -> int:
    """Bytes of AdamW's moments that do not exist before its first step, and are on the device while it trains."""
    if policy.puts_states_away:
        return 0
    optimizer = adam(policy.deepspeed_engine)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return sum(2 * weight.nbytes for weight in weights if weight.is_cuda and not optimizer.state.get(weight))
