"""Whether ranks wait for engines or engines for ranks, how many engines would balance the two, and what to change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from grpo_spec.generation import Topology
from grpo_spec.trainer import TrainerConfig
from grpo_spec.words import counted

FEWEST_ROUNDS = 5
MOST_ROUNDS = 20
"""Rounds that are looked at: a round is maxStaleness + 1 steps."""
HARDLY = 0.1
"""Waiting for less than this share of the time is no loss worth a change."""
STEADY = 0.05
"""Hysteresis: another number of engines is proposed only when the estimate is nearer to it by this share."""
UNEVEN = 2.0
"""Ratio of the longest completion to the mean from which on a step waits for few completions rather than for all."""
ENOUGH_STALENESS = 4
"""Least maxStaleness at which more of it is not proposed: tokens get older, and little waiting is left to end."""
NEARLY_1 = 0.999

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The time of some steps, by its use."""

    waiting: float  # share in which ranks waited for completions
    idle: float  # share in which engines had no request
    unevenness: float  # longest completion of a step / mean length

    @property
    def load(self) -> float:
        """Time in which engines worked / time in which ranks did not wait for them."""
        return (1 - self.idle) / (1 - min(self.waiting, NEARLY_1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The evidence of the last steps."""

    engines: int | None = None  # number that would balance them; None where it is unknown or has no meaning
    advice: str | None = None  # what to change, as a sentence; None while it is unknown, and if all is balanced

    @property
    def metrics(self) -> dict[str, float]:
        """The evidence in a step's metrics."""
        return {} if self.engines is None else {"engines/balanced": float(self.engines)}


class Advisor:
    """Follows the steps of an attempt, and says after each what would balance ranks and engines.

    It looks at whole rounds. With maxStaleness n, steps come in bursts: while ranks wait for the longest completion of
    one, those of the next n are finished too. So a median of single steps would miss either the waiting or the burst.
    A median of rounds leaves out a round in which an engine was lost.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._staleness, self._topology = config.training.max_staleness, config.generation.topology
        # Then engines wait for all the steps of a generation by design, and maxStaleness cannot be raised.
        self._takes_turns = config.training.steps_per_push > 1
        self._ahead = self._staleness + 2  # first steps: they load, compile, and have nothing sampled ahead
        self._round: list[tuple[float, float, float, float]] = []
        self._rounds: deque[Shares] = deque(maxlen=MOST_ROUNDS)
        self._sizes: tuple[int, ...] = ()
        self._kept: int | None = None  # what was proposed last for these engines
        self._before: tuple[int, float] | None = None  # GPUs of the engines before these, and of those that balanced
        self._most: int | None = None  # engines above this did not help
        self._answer = Balance()

    def add(self, metrics: Metrics, seconds: float, sizes: Sequence[int]) -> Balance:
        """Add a step that has ended, and return what the last ones show.

        After engines have joined or left, the last number holds for FEWEST_ROUNDS rounds, without advice.

        Args:
            metrics: metrics of the step.
            seconds: time since the step before it ended, so that saving a checkpoint is part of it.
            sizes: GPUs of each engine that samples now. Where they differ, engines are proposed in the same mix: the
                work of engines counts by their GPUs.
        """
        if self._takes_turns or "ranks/engines_idle_seconds/min" not in metrics or not sizes:
            return self._answer
        if self._ahead:
            self._ahead -= 1
            return self._answer
        if tuple(sizes) != self._sizes:
            self._change_engines(tuple(sizes))
        self._round.append(
            (
                seconds,
                metrics["ranks/generate_seconds/max"],
                metrics["ranks/engines_idle_seconds/min"],
                metrics["completions/max_length"] / max(1.0, metrics["completions/mean_length"]),
            )
        )
        if len(self._round) > self._staleness:
            self._rounds.append(_shares(self._round))
            self._round = []
            if len(self._rounds) >= FEWEST_ROUNDS:
                self._answer = self._decide(_middle(self._rounds))
        return self._answer

    def _change_engines(self, sizes: tuple[int, ...]) -> None:
        if len(self._rounds) >= FEWEST_ROUNDS:
            self._before = sum(self._sizes), sum(self._sizes) * _middle(self._rounds).load
        self._sizes, self._kept, self._answer = sizes, None, Balance(engines=self._answer.engines)
        self._rounds.clear()
        self._round = []

    def _decide(self, shares: Shares) -> Balance:
        number, gpus = len(self._sizes), sum(self._sizes)
        if self._before is not None:
            if gpus > self._before[0]:
                self._most = None if have_helped(*self._before, gpus, gpus * shares.load) else number
            self._before = None
        most = 2 * number if self._most is None else max(number, self._most)
        self._kept = max(-(-number // 2), min(most, nearest(number * shares.load, self._kept or number)))
        if self._topology is not Topology.SERVER:
            return Balance(advice=advise(shares, self._staleness, self._topology, self._sizes, number))
        advice = advise(shares, self._staleness, self._topology, self._sizes, self._kept)
        # Without staleness, they take turns: no number of engines ends that.
        return Balance(engines=self._kept if self._staleness else None, advice=advice)


def have_helped(old_gpus: int, old_need: float, gpus: int, need: float) -> bool:
    """Whether more GPUs for engines made completions come sooner: by at least half of what was expected, in logarithms.

    If all ranks wait for is the longest completion, which no engine samples faster, then the GPUs that seem to be
    needed grow with those that are there.
    """
    return need < old_need * math.sqrt(gpus / old_gpus)


def nearest(need: float, kept: int) -> int:
    """Return the number of engines nearest to `need`, by ratio: with it, the side that waits more waits least.

    Args:
        need: number of engines that would have their work done just when ranks want it.
        kept: the number proposed before; it stays unless `need` is STEADY beyond the point where another is nearer.
    """
    if math.sqrt(kept * (kept - 1)) <= need * (1 + STEADY) and need <= (1 + STEADY) * math.sqrt(kept * (kept + 1)):
        return kept
    below = max(1, math.floor(need))
    return below + (need > math.sqrt(below * (below + 1)))


def advise(shares: Shares, staleness: int, topology: Topology, sizes: Sequence[int], engines: int) -> str | None:
    """Return what to change, as a sentence that names fields; None if neither side waits long.

    Args:
        shares: of the last rounds.
        staleness: maxStaleness.
        topology: Server or NodeLocal.
        sizes: GPUs of each engine.
        engines: number of engines that would balance; that of now if it is unknown.
    """
    waiting, idle = shares.waiting >= HARDLY, shares.idle >= HARDLY
    may_be_staler = staleness < ENOUGH_STALENESS
    cures = []
    if idle and may_be_staler and (waiting or staleness == 0):
        cures.append(_stale(staleness))
    elif waiting or idle:
        if topology is Topology.NODE_LOCAL:
            change = "more" if waiting else "fewer"
            cures.append(f"give engines {change} GPUs of each pod (spec.generation.nodeLocal.gpusPerNode)")
        elif (waiting and engines > len(sizes)) or (idle and engines < len(sizes)):
            cures.append(_other_number(sizes, engines))
        if waiting and may_be_staler and staleness and shares.unevenness >= UNEVEN:
            longest = f"the longest completion has {shares.unevenness:.1f} times the mean length"
            cures.append(f"{_stale(staleness)}, since {longest}")
        if not cures:
            shorter = "allow shorter completions (spec.training.maxCompletionLength) in the next run"
            memory = "leave out spec.training.maxTokensPerMicroBatch, or give training more memory"
            cures.append(shorter if waiting else f"train with larger micro-batches ({memory}) in the next run")
    if not cures:
        return None
    seen = f"ranks wait {shares.waiting:.0%} of a step for completions, engines are idle {shares.idle:.0%}"
    return f"{seen}: {'; or '.join(cures)}"


def _stale(staleness: int) -> str:
    return f"raise spec.training.maxStaleness from {staleness} to {staleness + 1} in the next run"


def _other_number(sizes: Sequence[int], engines: int) -> str:
    mix = ", of the same sizes" if len(set(sizes)) > 1 else ""
    where = "replicas in spec.generation.server.elastic; maxReplicas there, or replicas of groups, while suspended"
    return f"run {counted(engines, 'engine')} in place of {len(sizes)}{mix} ({where})"


def _shares(steps: Sequence[tuple[float, float, float, float]]) -> Shares:
    seconds, waiting, idle, unevenness = (math.fsum(column) for column in zip(*steps, strict=True))
    return Shares(
        waiting=min(1.0, waiting / seconds), idle=min(1.0, idle / seconds), unevenness=unevenness / len(steps)
    )


def _middle(rounds: Sequence[Shares]) -> Shares:
    return Shares(
        waiting=median(one.waiting for one in rounds),
        idle=median(one.idle for one in rounds),
        unevenness=median(one.unevenness for one in rounds),
    )
