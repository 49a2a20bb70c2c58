"""Chooses how many tokens a micro-batch may hold, by passes of growing size on the policy itself.

Ends with the longest sequence that the job allows, so that what does not fit shows here, and not after days.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from grpo_spec.optimizer import INT8_MOMENTS
from grpo_workload.algorithm.micro_batch import MicroBatch, filler, micro_batch
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.algorithm.token_budget import NUM_PASSES, Pass, expected, largest, next_pass
from grpo_workload.policy.memory.memory_error import SequenceMemoryError
from grpo_workload.policy.memory.optimizer_offload import adam
from grpo_workload.policy.step.policy import Policy
from grpo_workload.ranks.collectives import gather

logger = logging.getLogger(__name__)

GIB = 2**30
SPARE = 0.1
"""Share of a GPU that stays free: for fragments, NCCL's buffers, and what long completions among short ones take."""


class Room(NamedTuple):
    """Bytes of a device that are free."""

    free: int
    spare: int  # of these, what a micro-batch whose size is chosen leaves

    @property
    def usable(self) -> int:
        """Bytes that a micro-batch whose size is chosen may take."""
        return self.free - self.spare


class Memory(Protocol):
    """The memory of a rank's device."""

    def begin(self) -> Room:
        """Begin a pass; returns what is free."""
        ...

    def peak(self) -> int:
        """Return the bytes that the pass has taken at its peak."""
        ...


class CudaMemory:
    """Memory of a GPU, by what torch reserves in it: with fragments, and without a sleeping engine's addresses."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._reserved = policy, 0

    def begin(self) -> Room:
        """See `Memory.begin`. What is cached, and what the optimizer's first step will allocate, is accounted for."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._reserved = torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        return Room(free - missing_moments(self._policy), int(SPARE * total))

    def peak(self) -> int:
        """See `Memory.peak`."""
        return torch.cuda.max_memory_reserved() - self._reserved


class Choice(NamedTuple):
    """The result of a trial, the same on every rank."""

    tokens: int  # of a micro-batch, at most
    rooms: list[int]  # bytes that a micro-batch may take, by rank
    longest: int  # bytes that the longest sequence takes: the most of all ranks

    @property
    def room(self) -> int:
        """Bytes that a micro-batch may take on every rank."""
        return min(self.rooms)


@dataclass
class TooLongError(Exception):
    """The longest sequence does not fit into a rank's memory."""

    free: int  # bytes that it may take
    needed: int  # bytes that it takes, or as much as is known
    cause: str  # what torch says; empty if the pass itself found memory that a step will need

    def __str__(self) -> str:
        """Say what is missing."""
        return f"{self.needed} bytes are needed, {self.free} are free: {self.cause}"


def try_memory(
    policy: Policy, memory: Memory, longest: Sample, *, most: int, fixed: int | None, halvings: int
) -> Choice:
    """Return how many tokens a micro-batch may hold, after a pass over the longest sequence; collective.

    The passes are those of one step, whose gradients are dropped: the first, over two tokens, allocates what all steps
    allocate once, and gradients. See `Policy.rehearse` for what stays as it is.

    Args:
        policy: the policy, with engines on its device in the state in which they are while it trains.
        memory: of this rank's device.
        longest: the longest sequence that the job allows.
        most: the largest number of tokens of use.
        fixed: a size that is not chosen: micro-batches of as many of the longest sequences are tried, and it is kept.
        halvings: how often the number is halved, since larger micro-batches ran out of memory.

    Raises:
        TooLongError: the longest sequence does not fit into a rank's memory.
        MicroBatchMemoryError: several sequences ran out of memory together.
    """
    passes: list[Pass] = []
    rooms: list[Room] = []  # of all ranks, before the last pass
    took: list[int] = []
    length = num_tokens(longest)

    def begin() -> int:
        rooms[:] = gather(memory.begin())
        return min(room.usable for room in rooms)

    def batches() -> Iterator[MicroBatch]:
        begin()
        yield filler()
        for _ in range(NUM_PASSES if fixed is None else 0):
            tokens = next_pass(passes, begin(), max(1, most >> halvings))
            if not tokens:
                yield filler()
                continue
            yield random_batch(policy, tokens, length)
            passes.append(Pass(tokens, max(gather(memory.peak()))))
        if fixed is not None:
            count = min(fixed, most) // length
            yield _batch(policy, [_with_own_images(longest) for _ in range(count)]) if count > 1 else filler()
        begin()
        yield _batch(policy, [longest])
        took.append(max(gather(memory.peak())))  # here: the optimizer's step takes memory, too

    count = 1 + (NUM_PASSES if fixed is None else 1) + 1
    try:
        policy.rehearse(batches(), count)
    except SequenceMemoryError as error:
        needed = max(memory.peak(), expected(passes, length))
        raise TooLongError(min(room.free for room in rooms), needed, str(error.__cause__)) from error
    for one in passes:
        logger.info("a micro-batch of %d tokens takes %.2f GiB", one.tokens, one.memory / GIB)
    logger.info("the longest sequence, of %d tokens, takes %.2f GiB", length, took[0] / GIB)
    if took[0] > (free := min(room.free for room in rooms)):
        raise TooLongError(free, took[0], "")
    usable = [room.usable for room in rooms]
    tokens = fixed or max(1, min(most, largest(passes, min(usable))) >> halvings)
    return Choice(tokens, usable, took[0])


def num_tokens(sample: Sample) -> int:
    """Return the number of tokens of a sequence, of prompt and completion."""
    return len(sample.prompt.token_ids) + len(sample.completion.token_ids)


def random_batch(policy: Policy, tokens: int, length: int) -> MicroBatch:
    """Make a micro-batch of random sequences of `length` tokens, whose first is the prompt."""
    ids = random_ids(policy, max(2, tokens))
    parts = [ids[start : start + length] for start in range(0, len(ids), length)]
    return _batch(policy, [make_sample(Prompt(index=-1, text="", token_ids=part[:1]), part[1:]) for part in parts])


def longest_sample(policy: Policy, tokens: int, completion_tokens: int, prompt: Prompt | None) -> Sample:
    """Make a sequence of so many tokens, whose last `completion_tokens` are a completion.

    It begins with the tokens and images of `prompt`, if that has images; other tokens are random.
    """
    ids = random_ids(policy, tokens)
    if prompt is None or prompt.images is None:
        prompt = Prompt(index=-1, text="", token_ids=())
    else:  # a further token of an image would be in want of its features
        ids = tuple(token if token != prompt.images.token_id else 0 for token in ids)
    given = prompt.token_ids
    more = ids[len(given) : tokens - completion_tokens]
    return make_sample(replace(prompt, token_ids=(*given, *more)), ids[tokens - completion_tokens :])


def random_ids(policy: Policy, count: int) -> tuple[int, ...]:
    """Return the same random tokens on every rank; random numbers of others stay as they are."""
    vocabulary = policy.module.config.get_text_config().vocab_size
    return tuple(torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist())


def make_sample(prompt: Prompt, ids: tuple[int, ...]) -> Sample:
    """Return a sample of `prompt` and the completion `ids`."""
    answer = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), text="", finish_reason="stop", weight_version=0)
    return Sample(prompt=prompt, completion=answer, reward=0.0, advantage=1.0)


def _batch(policy: Policy, samples: Sequence[Sample]) -> MicroBatch:
    batch = micro_batch([sample for sample in samples if sample.completion.token_ids])
    if (replay := policy.head.replay) is None:
        return batch
    return replace(batch, experts_NLX=replay.own_choice(batch.num_tokens))


def _with_own_images(sample: Sample) -> Sample:
    """Copy, so that its images are not those of others in its micro-batch, for which the model would look once."""
    if (images := sample.prompt.images) is None:
        return sample
    return replace(sample, prompt=replace(sample.prompt, images=replace(images, inputs=dict(images.inputs))))


def missing_moments(policy: Policy) -> int:
    """Return bytes of AdamW's moments that do not exist before its first step, and stay on the device after it."""
    if policy.puts_states_away:
        return 0
    optimizer = adam(policy.deepspeed_engine)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    missing = [weight for weight in weights if weight.is_cuda and not optimizer.state.get(weight)]
    if policy.has_int8_moments:
        return sum(math.ceil(INT8_MOMENTS * weight.numel()) for weight in missing)
    return sum(2 * weight.nbytes for weight in missing)
