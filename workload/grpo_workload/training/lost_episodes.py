"""Episodes that are lost since their environment failed: how many of them a step may lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_workload.algorithm.samples import Completion
from grpo_workload.ranks.collectives import gather


class EnvironmentFailedError(Exception):
    """More episodes were lost than `episodes.maxFailedShare` allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The lost episodes of one rank."""

    count: int  # of all its episodes
    causes: Counter[str]  # number of lost ones by cause
    last: str = ""  # what the last of them failed with

    @staticmethod
    def of(completions: Sequence[Completion]) -> Losses:
        """Count the lost ones of some completions."""
        lost = [one.episode for one in completions if one.episode is not None and one.episode.lost is not None]
        return Losses(
            count=len(completions),
            causes=Counter(one.lost or "" for one in lost),
            last=next((one.failure for one in reversed(lost) if one.failure), ""),
        )


def check_lost(completions: Sequence[Completion], largest_share: float) -> None:
    """Raise EnvironmentFailedError on every rank if all ranks together have lost too many episodes; collective.

    Args:
        completions: this rank's.
        largest_share: of lost ones among those of all ranks, that is not too many.
    """
    if complaint := too_many(gather(Losses.of(completions)), largest_share):
        raise EnvironmentFailedError(complaint)


def too_many(ranks: Sequence[Losses], largest_share: float) -> str | None:
    """Say that more than `largest_share` of the episodes of all ranks are lost, and why; None if they are not."""
    causes: Counter[str] = sum((one.causes for one in ranks), Counter())
    count, lost = sum(one.count for one in ranks), causes.total()
    if not lost or lost <= largest_share * count:
        return None
    parts = ", ".join(f"{number} {cause}" for cause, number in causes.most_common())
    last = next((one.last for one in reversed(ranks) if one.last), "")
    why = f"; the last failure: {last}" if last else ""
    return (
        f"the environment failed in {lost} of {count} episodes, also when they began again ({parts}), and "
        f"episodes.maxFailedShare is {largest_share:g}{why}. Look at what the environments need, or raise "
        f"episodes.retries"
    )
