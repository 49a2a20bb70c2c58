"""What each rank did in a step, side by side: who is slow, who pads, whose device is full. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean

WORK = ("prompts", "generate", "reward", "journal")
"""Phases of a step in which a rank works by itself; then it waits for the others, and goes on in step with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """How a rank's GPU was used during a step. None is what its driver does not tell, and all of it on a CPU."""

    gpu_utilization: float | None = None  # percent of the time in which any kernel ran, by whatever process
    memory_used_peak: int | None = None  # bytes of the device, by whatever process
    memory_allocated_peak: int | None = None  # bytes, by this process's torch
    memory_reserved_peak: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's part in a step."""

    rank: int
    seconds: Mapping[str, float]  # by phase: see `grpo_workload.clock`
    generated_tokens: int  # sampled in this step, without what the journal had
    sample_tokens: int  # of the prompts and completions that it sampled
    longest_sample_tokens: int
    trained_tokens: int  # of the samples it trained on: some came from other ranks, and what changes nothing is left out
    fed_tokens: int  # the same with what fills up micro-batches
    device: DeviceUse = field(default_factory=DeviceUse)

    @property
    def generated_tokens_per_second(self) -> float:
        """While it generated."""
        return _ratio(self.generated_tokens, self.seconds["generate"])

    @property
    def trained_tokens_per_second(self) -> float:
        """While it trained, padding left out."""
        return _ratio(self.trained_tokens, self.seconds["train"])

    @property
    def padding_fraction(self) -> float:
        """Share of what the model was fed that is padding."""
        return _ratio(self.fed_tokens - self.trained_tokens, self.fed_tokens)

    @property
    def longest_sample_share(self) -> float:
        """Tokens of its longest sample as a share of its tokens: near 1, one sample is all that the rank waits for."""
        return _ratio(self.longest_sample_tokens, self.sample_tokens)

    @property
    def work_seconds(self) -> float:
        """In which it worked by itself, before it waited for the other ranks."""
        return sum(self.seconds.get(phase, 0.0) for phase in WORK)

    def as_json(self) -> dict[str, object]:
        """The record as ranks.jsonl has it: what is not known is left out, and four digits tell enough."""
        derived = {name: getattr(self, name) for name in DERIVED}
        device = {name: value for name, value in asdict(self.device).items() if value is not None}
        counted = {name: getattr(self, name) for name in COUNTED}
        rounded = {name: _short(value) for name, value in (derived | device).items()}
        return counted | rounded | {"seconds": {phase: _short(seconds) for phase, seconds in self.seconds.items()}}


COUNTED = ("rank", "generated_tokens", "sample_tokens", "trained_tokens", "fed_tokens")
DERIVED = ("generated_tokens_per_second", "trained_tokens_per_second", "padding_fraction", "longest_sample_share")


def summarise_ranks(ranks: Sequence[RankStep]) -> dict[str, float]:
    """What the step's own metrics tell of its ranks.

    `ranks/slowest` is the rank whose own work took longest, for `ranks/slowest_seconds`, and `ranks/imbalance` that over the mean of all:
    1 when none waits. Of what each rank has, the least and the most: names end in /min and /max. What no rank knows is left out.
    """
    slowest = max(ranks, key=lambda one: one.work_seconds)
    fed = sum(one.fed_tokens for one in ranks)
    metrics = {
        "padding_fraction": _ratio(fed - sum(one.trained_tokens for one in ranks), fed),
        "ranks/slowest": float(slowest.rank),
        "ranks/slowest_seconds": slowest.work_seconds,
        "ranks/imbalance": slowest.work_seconds / mean(one.work_seconds for one in ranks) if slowest.work_seconds else 1.0,
    }
    metrics |= _extremes("generate_seconds", [one.seconds["generate"] for one in ranks])
    metrics |= _extremes("train_seconds", [one.seconds["train"] for one in ranks])
    metrics |= _extremes("trained_tokens", [one.trained_tokens for one in ranks])
    for name in DERIVED:
        metrics |= _extremes(name, [getattr(one, name) for one in ranks])
    for name in DeviceUse.__dataclass_fields__:
        metrics |= _extremes(name, [value for one in ranks if (value := getattr(one.device, name)) is not None])
    return metrics


def _extremes(name: str, values: Iterable[float]) -> dict[str, float]:
    known = list(values)
    return {f"ranks/{name}/min": float(min(known)), f"ranks/{name}/max": float(max(known))} if known else {}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _short(value: float) -> float:
    return round(value, 4)
