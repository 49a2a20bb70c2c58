"""The samples that each rank trains on: ranks get about equally many tokens, in the same number of micro-batches.
Neighbouring ranks that share sequences (`parallelism.sequence`) get the same samples.

The plan is a pure function of facts that all ranks have, so they all compute the same plan without communicating.
Samples without a gradient are left out: those outside the loss, and those of advantage 0 unless other terms of the loss
(`beta`) give them one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.loss import LossScale
from grpo_workload.algorithm.micro_batch import FILLER_TOKENS
from grpo_workload.algorithm.packing import pack
from grpo_workload.algorithm.pieces import Piece, Unit, units
from grpo_workload.algorithm.samples import Episode, length
from grpo_workload.algorithm.sequence_part import shares

TOLERANCE = 0.02
"""Samples move only while ranks differ by more than this share of a rank's mean tokens: moving costs time, too."""


class EpisodeFact(NamedTuple):
    """Facts about an episode that metrics need."""

    lost: str | None = None  # the cause, if its environment failed
    turns: int = 1
    calls: int = 0
    failed_calls: int = 0
    call_seconds: float = 0.0
    wait_seconds: float = 0.0
    retries: int = 0
    context_tokens: int = 0  # with the prompts of forks
    sequences: int = 1

    @staticmethod
    def of(episode: Episode) -> EpisodeFact:
        """Return the facts about an episode."""
        return EpisodeFact(
            lost=episode.lost,
            turns=episode.num_turns,
            calls=episode.num_calls,
            failed_calls=episode.num_failed_calls,
            call_seconds=episode.call_seconds,
            wait_seconds=episode.wait_seconds,
            retries=episode.retries,
            context_tokens=length(episode.context)
            + sum(len(one.prompt_ids) + length(one.context) for one in episode.forks),
            sequences=1 + len(episode.forks),
        )


class Fact(NamedTuple):
    """Facts about a completion of the step that every rank has."""

    prompt_tokens: int  # number of tokens that the model only reads: of the prompt, and of an episode's context
    tokens: int  # number of completion tokens that the model sampled
    is_truncated: bool
    reward: float
    advantage: float
    has_logprobs: bool = True  # whether the generator's log-probabilities are all finite
    staleness: int = 0  # updates between the weights that sampled its first token and those that train on it
    episode: EpisodeFact | None = None
    sequences: tuple[int, ...] = ()  # tokens of each, if an episode has several
    # The prompt that its (first) sequence begins with, by a number among its rank's, and its tokens; None: that cannot
    # be shared with other completions.
    prompt: tuple[int, int] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each of its sequences."""
        return self.sequences or (self.prompt_tokens + self.tokens,)

    @property
    def is_lost(self) -> bool:
        """Whether its environment failed, so that it counts nowhere."""
        return self.episode is not None and self.episode.lost is not None


@dataclass(frozen=True, slots=True)
class Plan:
    """The samples that each sequence group trains on in a step: each rank, unless several share sequences."""

    scale: LossScale  # denominators of the whole step, including samples without a gradient
    bins: list[list[list[Piece]]]  # samples by group and micro-batch
    sequence: int = 1  # neighbouring ranks of a group

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, the same on every rank: fillers make up for missing ones."""
        return max(1, *(len(own) for own in self.bins))

    def trained_tokens(self, rank: int) -> int:
        """Number of tokens of the samples that `rank` trains on; those of a shared prompt count once."""
        group, place = divmod(rank, self.sequence)
        return shares(sum(piece.fed for pieces in self.bins[group] for piece in pieces), self.sequence)[place]

    def fed_tokens(self, rank: int) -> int:
        """Number of tokens that `rank` feeds the model, including fillers."""
        group, place = divmod(rank, self.sequence)
        fillers = FILLER_TOKENS * (self.num_micro_batches - len(self.bins[group]))
        return self.trained_tokens(rank) + shares(fillers, self.sequence)[place]


def plan(
    facts: Sequence[Sequence[Fact]], training: TrainingConfig, *, shares_prompts: bool = False, sequence: int = 1
) -> Plan:
    """Plan the training on completions `facts[rank][index]`.

    With `shares_prompts`, some are fed their prompt once; `sequence` neighbouring ranks share each sequence.
    """
    num_tokens = sum(fact.tokens for own in facts for fact in own if _in_loss(fact, training))
    # Without a limit of the user's, a micro-batch may have all sequences of the step.
    count = sum(len(fact.lengths) for own in facts for fact in own)
    max_sequences = training.per_device_train_batch_size or max(1, count)
    by_rank = [
        units(
            [
                (
                    Piece(rank, place, tokens, number),
                    fact.prompt if shares_prompts and number == 0 else None,
                )
                for place, fact in enumerate(own)
                if _in_loss(fact, training) and (fact.advantage != 0 or training.trains_advantage_0)
                for number, tokens in enumerate(fact.lengths)
            ],
            max_tokens=training.micro_batch_tokens,
            max_sequences=max_sequences,
        )
        for rank, own in enumerate(facts)
    ]
    by_group = [[*chain(*by_rank[first : first + sequence])] for first in range(0, len(by_rank), sequence)]
    num_sequences = sum(not fact.is_lost for own in facts for fact in own)
    scale = LossScale(num_sequences=max(1, num_sequences), num_tokens=num_tokens)
    bins = [_pack(share, training.micro_batch_tokens, max_sequences) for share in spread(by_group)]
    return Plan(scale=scale, bins=bins, sequence=sequence)


def spread(shares: Sequence[Sequence[Unit]]) -> list[list[Unit]]:
    """Even out `shares`: ranks with the most tokens give to those with the fewest until that no longer helps.

    Samples that share a prompt move together, or half of them, which costs the tokens of the prompt once more.
    """
    result = [list(share) for share in shares]
    loads = [sum(unit.tokens for unit in share) for share in result]
    while True:
        rich, poor = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[rich] - loads[poor]
        if gap <= TOLERANCE * sum(loads) / len(loads):
            return result
        # The loop ends because each move brings two loads closer together, and units are split only so often.
        smaller = [unit for unit in result[rich] if unit.tokens < gap]
        if smaller:
            unit = min(smaller, key=lambda unit: abs(2 * unit.tokens - gap))
            result[rich].remove(unit)
            result[poor].append(unit)
            loads[poor] += unit.tokens
        elif split := next((unit for unit in result[rich] if _helps(unit, gap)), None):
            result[rich].remove(split)
            result[rich] += split.halves()
        else:
            return result
        loads[rich] = sum(unit.tokens for unit in result[rich])


def _helps(unit: Unit, gap: int) -> bool:
    """Whether one of the unit's halves can then move."""
    return len(unit.pieces) > 1 and max(half.tokens for half in unit.halves()) < gap


def _pack(share: Sequence[Unit], max_tokens: int, max_sequences: int) -> list[list[Piece]]:
    sizes, counts = [unit.size for unit in share], [len(unit.pieces) for unit in share]
    bins = pack(sizes, max_tokens=max_tokens, max_sequences=max_sequences, counts=counts)
    return [[piece for index in indices for piece in share[index].pieces] for indices in bins]


def _in_loss(fact: Fact, training: TrainingConfig) -> bool:
    is_cut = fact.is_truncated and training.mask_truncated_completions
    return fact.has_logprobs and not is_cut and not fact.is_lost
