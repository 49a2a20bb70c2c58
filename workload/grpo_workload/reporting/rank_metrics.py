"""Each rank's work in a step: one may be slow, pad, or fill its device. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean

WORK = ("prompts", "generate", "reward", "journal")
"""Phases of a step in which a rank works without the others; after them, all ranks move on together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """A rank's use of its GPU during a step. None if the driver does not report a value; on a CPU all are None."""

    gpu_utilization: float | None = None  # percent of the time in which a kernel of any process ran
    memory_used_peak: int | None = None  # bytes of the device, by all processes
    memory_allocated_peak: int | None = None  # bytes allocated by this process's torch
    memory_reserved_peak: int | None = None  # bytes reserved by this process's torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's part in a step."""

    rank: int
    seconds: Mapping[str, float]  # by phase: see `grpo_workload.ranks.clock`
    generated_tokens: int  # completion tokens sampled in this step; groups from the journal do not count
    sample_tokens: int  # tokens of its samples, prompts and completions
    longest_sample_tokens: int
    trained_tokens: int  # tokens it trained on: samples may come from other ranks; those without effect are left out
    fed_tokens: int  # trained_tokens and the padding of micro-batches
    timeouts: Mapping[str, int] = field(default_factory=dict)  # answers not compared in time, by reward
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)  # values that users' rewards logged, by metric
    engines_idle_seconds: float | None = None  # in which engines had no request of it; None if they share its device
    device: DeviceUse = field(default_factory=DeviceUse)

    @property
    def generated_tokens_per_second(self) -> float:
        """Completion tokens per second while it generated."""
        return _ratio(self.generated_tokens, self.seconds.get("generate", 0.0))

    @property
    def trained_tokens_per_second(self) -> float:
        """Tokens per second while it trained, without padding."""
        return _ratio(self.trained_tokens, self.seconds["train"])

    @property
    def padding_fraction(self) -> float:
        """Share of padding in the tokens that the model was fed."""
        return _ratio(self.fed_tokens - self.trained_tokens, self.fed_tokens)

    @property
    def longest_sample_share(self) -> float:
        """Share of its longest sample in its tokens: near 1, the rank waits for one sample only."""
        return _ratio(self.longest_sample_tokens, self.sample_tokens)

    @property
    def work_seconds(self) -> float:
        """Seconds in which it worked before it waited for the other ranks."""
        return sum(self.seconds.get(phase, 0.0) for phase in WORK)

    def as_json(self) -> dict[str, object]:
        """Return the record for ranks.jsonl: unknown values are left out, others rounded to four digits."""
        derived = {name: getattr(self, name) for name in DERIVED}
        device = {name: value for name, value in asdict(self.device).items() if value is not None}
        counted = {name: getattr(self, name) for name in COUNTED}
        rounded = {name: _short(value) for name, value in (derived | device).items()}
        if self.engines_idle_seconds is not None:
            rounded["engines_idle_seconds"] = _short(self.engines_idle_seconds)
        return counted | rounded | {"seconds": {phase: _short(seconds) for phase, seconds in self.seconds.items()}}


COUNTED = ("rank", "generated_tokens", "sample_tokens", "trained_tokens", "fed_tokens")
DERIVED = ("generated_tokens_per_second", "trained_tokens_per_second", "padding_fraction", "longest_sample_share")


def summarise_ranks(ranks: Sequence[RankStep]) -> dict[str, float]:
    """Return the metrics of a step that compare its ranks.

    `ranks/slowest` is the rank whose own work took longest, which is `ranks/slowest_seconds`. `ranks/imbalance` is this
    time divided by the mean over all ranks: 1 if none waits. Values of each rank are reported as their minimum (/min)
    and maximum (/max); a value that no rank knows is left out. `rewards/<name>/timeouts` is their sum. A metric that
    rewards logged is the mean of all its values.
    """
    slowest = max(ranks, key=lambda one: one.work_seconds)
    fed = sum(one.fed_tokens for one in ranks)
    metrics = {
        "padding_fraction": _ratio(fed - sum(one.trained_tokens for one in ranks), fed),
        "ranks/slowest": float(slowest.rank),
        "ranks/slowest_seconds": slowest.work_seconds,
        "ranks/imbalance": slowest.work_seconds / mean(one.work_seconds for one in ranks)
        if slowest.work_seconds
        else 1.0,
    }
    for name in ranks[0].timeouts:
        metrics[f"rewards/{name}/timeouts"] = float(sum(one.timeouts[name] for one in ranks))
    for name in sorted({name for one in ranks for name in one.logged}):
        metrics[name] = mean(value for one in ranks for value in one.logged.get(name, ()))
    metrics |= _extremes("generate_seconds", [one.seconds.get("generate", 0.0) for one in ranks])
    metrics |= _extremes("train_seconds", [one.seconds["train"] for one in ranks])
    metrics |= _extremes("trained_tokens", [one.trained_tokens for one in ranks])
    idle = [one.engines_idle_seconds for one in ranks if one.engines_idle_seconds is not None]
    metrics |= _extremes("engines_idle_seconds", idle)
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
