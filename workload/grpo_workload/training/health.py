"""Faults of the last steps of a run, from their metrics alone.

Numbers are not finite, nothing is learned, or trainer and generator disagree.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from grpo_spec.reasons import Reason
from grpo_spec.reports import RunWarning
from grpo_spec.rewards import RewardConfig
from grpo_workload.algorithm.advantage import ZERO, mean
from grpo_workload.policy.step.finite import NotFiniteError

WINDOW = 20
"""Number of last steps that are looked at. Warnings that a run learns nothing need all of them."""
FEWEST_KNOWN = 5
"""Number of steps that must be known before trainer and engine are said to disagree. What is set up wrong shows in each
step, and a whole window may take hours."""
MAX_KL = 0.1
"""Largest `sampling/kl`, in nats a token: two probabilities of a token then typically differ by a factor of 1.5. Jobs
that learn have 0.0001 (dense, bfloat16), 0.003 (the same on a CPU) to 0.02 (engines in FP8; routers not replayed)."""
MIN_ESS = 0.5
"""Smallest `sampling/ess`: half of the tokens would teach as much. Jobs that learn have 0.96 (FP8) to 0.9998. With
maxStaleness 4 the steps of a job had 0.99, single ones 0.4."""
MIN_WEIGHT = 0.5
"""Smallest mean of the factors by which the correction multiplies the loss. It is 1 where samples follow what the
engine says of them; below 0.5 the correction takes away more than it leaves. So does a `masked_fraction` over 0.5."""
LOWEST_LOSS_SCALE = 1.0

Metrics = Mapping[str, float]


class Health:
    """The last steps of an attempt. All ranks see the same metrics here, and so come to the same answer."""

    def __init__(self, max_skipped_steps: int, rewards: Sequence[RewardConfig] = ()) -> None:
        """Take training.maxSkippedSteps and the job's rewards. What happened before a restart is not counted."""
        self._limit, self._rewards = max_skipped_steps, rewards
        self._window: deque[Metrics] = deque(maxlen=WINDOW)
        self._in_a_row = 0
        self.skipped_steps = 0  # in this attempt

    def add(self, metrics: Metrics) -> tuple[RunWarning, ...]:
        """Add the metrics of a step that has ended, and return what is wrong with the last steps."""
        self._window.append(metrics)
        self.skipped_steps += bool(metrics["skipped"])
        self._in_a_row = self._in_a_row + 1 if is_lost(metrics) else 0
        return find_warnings(self._window, self._rewards)

    @property
    def gives_up(self) -> bool:
        """Whether more than maxSkippedSteps steps in a row were lost."""
        return self._in_a_row > self._limit

    def error(self) -> NotFiniteError:
        """Return the error that ends the job."""
        last = self._window[-1]
        return NotFiniteError(
            f"{self._in_a_row} steps in a row had no effect since numbers are not finite (the last step: loss "
            f"{last['loss']:g}, grad_norm {last['grad_norm']:g}); training.maxSkippedSteps is {self._limit}. The last "
            "checkpoint holds the weights, which these steps did not change. Look at the steps before them in "
            "metrics.jsonl: a lower learningRate, beta or reward weight, or model.dtype bfloat16 may help"
        )


def is_lost(metrics: Metrics) -> bool:
    """Whether the step taught nothing because of numbers that are not finite.

    In float16, DeepSpeed finds its loss scale by steps that overflow: those are not lost until the scale is at its
    lowest.
    """
    if metrics["skipped"]:
        return not math.isfinite(metrics["loss"]) or metrics.get("loss_scale", 0.0) <= LOWEST_LOSS_SCALE
    return metrics["completions/not_finite_ratio"] + sum(_overflows(metrics).values()) >= 1


def _overflows(metrics: Metrics) -> dict[str, float]:
    """Return by reward the share of completions whose sum of rewards it makes too large."""
    prefix, suffix = "rewards/", "/not_finite_ratio"
    return {
        name.removeprefix(prefix).removesuffix(suffix): share
        for name, share in metrics.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


def find_warnings(steps: Sequence[Metrics], rewards: Sequence[RewardConfig] = ()) -> tuple[RunWarning, ...]:
    """Return what is wrong with the last steps, the cause before its effects.

    Args:
        steps: metrics of at most WINDOW steps, oldest first.
        rewards: the job's.
    """
    found = [_not_finite(steps), _mismatch(steps)]
    if len(steps) == WINDOW:
        alike = _no_difference(steps)  # then all gradients are 0, too
        weighted = [reward for reward in rewards if reward.weight]
        found += [alike, _cut(steps), _unscored(steps, weighted)]
        found += [_dead(steps, weighted) if len(rewards) > 1 else None, None if alike else _zero_gradient(steps)]
    return tuple(warning for warning in found if warning is not None)


def left_out_warnings(reasons: Sequence[str]) -> tuple[RunWarning, ...]:
    """Return the warning about engines that are left out of pushes, given why each one is; none if there are none."""
    if not reasons:
        return ()
    return (RunWarning(reason=Reason.ENGINE_LEFT_OUT, message="; ".join(reasons)),)


def _not_finite(steps: Sequence[Metrics]) -> RunWarning | None:
    parts = []
    if lost := sum(map(is_lost, steps)):
        parts.append(f"{lost} had no effect since their loss, gradients or samples are not finite")
    if without := sum(step["completions/not_finite_ratio"] > 0 for step in steps):
        parts.append(f"{without} left completions out whose log-probabilities from the generator are not finite")
    for name in sorted({name for step in steps for name in _overflows(step)}):
        count = sum(name in _overflows(step) for step in steps)
        parts.append(f"{count} left completions out because rewards[{name}] is too large for float32")
    if not parts:
        return None
    return RunWarning(reason=Reason.NOT_FINITE, message=f"of the last {len(steps)} steps, {'; '.join(parts)}")


def _mismatch(steps: Sequence[Metrics]) -> RunWarning | None:
    kl, ess = _median(steps, "kl"), _median(steps, "ess")
    masked, weight = (_median(steps, f"importance_sampling_ratio/{name}") for name in ("masked_fraction", "mean"))
    found = []
    if kl is not None and kl > MAX_KL:
        found.append(f"kl is {kl:.2g} nats a token (more than {MAX_KL:g})")
    if ess is not None and ess < MIN_ESS:
        found.append(f"ess is {ess:.2g} (less than {MIN_ESS:g})")
    what = "trainer and engine disagree" if found else "importanceSamplingCorrection takes most of the loss away"
    if masked is not None and masked > 1 - MIN_WEIGHT:
        found.append(f"importance_sampling_ratio/masked_fraction is {masked:.2g} (more than {1 - MIN_WEIGHT:g})")
    if weight is not None and weight < MIN_WEIGHT:
        found.append(f"importance_sampling_ratio/mean is {weight:.2g} (less than {MIN_WEIGHT:g})")
    if not found:
        return None
    message = (
        f"in most of the last {len(steps)} steps, {what}: of trained/sampling, the median of {', of '.join(found)}"
    )
    return RunWarning(reason=Reason.SAMPLING_MISMATCH, message=message)


def _median(steps: Sequence[Metrics], name: str) -> float | None:
    """Median of `trained/sampling/<name>`, which one odd token does not move; steps that trained on nothing lack it."""
    values = [step.get(f"trained/sampling/{name}", math.nan) for step in steps]
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if len(known) >= FEWEST_KNOWN else None


def _no_difference(steps: Sequence[Metrics]) -> RunWarning | None:
    if any(step["frac_reward_zero_std"] < 1 and not math.isnan(step["reward"]) for step in steps):
        return None
    rewards = [step["reward"] for step in steps if not math.isnan(step["reward"])]
    if not rewards:
        message = f"no completion of the last {WINDOW} steps got a reward: every function returned None"
        return RunWarning(reason=Reason.CONSTANT_REWARD, message=message)
    if all(_is_close(reward, rewards[0]) for reward in rewards):
        message = (
            f"every completion of the last {WINDOW} steps got the reward {rewards[0]:g}: do the rewards read what "
        )
        return RunWarning(reason=Reason.CONSTANT_REWARD, message=f"{message}the model writes?")
    message = f"in the last {WINDOW} steps, all completions of a prompt got the same reward, so their advantage is 0"
    return RunWarning(reason=Reason.NO_REWARD_DIFFERENCE, message=message)


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _unscored(steps: Sequence[Metrics], rewards: Sequence[RewardConfig]) -> RunWarning | None:
    shares = {one.name: mean([step.get(f"rewards/{one.name}/unscored", 0.0) for step in steps]) for one in rewards}
    found = [f"rewards[{name}] gave {share:.0%} no value" for name, share in shares.items() if share > 0.5]
    if not found:
        return None
    message = f"of the completions of the last {WINDOW} steps, {'; '.join(found)}: do their rows have what it reads?"
    return RunWarning(reason=Reason.COMPLETIONS_UNSCORED, message=message)


def _dead(steps: Sequence[Metrics], rewards: Sequence[RewardConfig]) -> RunWarning | None:
    values = [(reward, _constant(steps, reward.name)) for reward in rewards]
    found = [
        f"rewards[{reward.name}] gave {value:g}"
        for reward, value in values
        if value is not None and _could_be_better(reward, value)
    ]
    if not found:
        return None
    message = f"to every completion of the last {WINDOW} steps {'; '.join(found)}: does it find what it looks for?"
    return RunWarning(reason=Reason.DEAD_REWARD, message=message)


def _constant(steps: Sequence[Metrics], name: str) -> float | None:
    """Return the value that a reward gave each completion that it scored; None if there are several, or none."""
    means = [step.get(f"rewards/{name}/mean", math.nan) for step in steps]
    known = [one for one in means if not math.isnan(one)]
    differs = any(step.get(f"rewards/{name}/std", math.nan) > ZERO for step in steps)
    return known[0] if known and not differs and all(_is_close(one, known[0]) for one in known) else None


def _could_be_better(reward: RewardConfig, value: float) -> bool:
    """Whether a reward that gives all completions `value` may give more.

    Those that are built in have a range. What users' functions, judges and environments give at best is not known. 0 of
    them may be a penalty that nobody deserves, and more than 0 what is good; but what is taken from all could be less.
    """
    if reward.code is not None or reward.judge is not None or reward.environment is not None:
        return reward.weight * value < 0
    low, high = (-1.0, 0.0) if reward.soft_overlong is not None else (0.0, 1.0)
    return not _is_close(value, high if reward.weight > 0 else low)


def _cut(steps: Sequence[Metrics]) -> RunWarning | None:
    if any(step["completions/clipped_ratio"] < 1 for step in steps):
        return None
    length = max(step["completions/max_length"] for step in steps)
    message = f"every completion of the last {WINDOW} steps was cut; the longest has {length:.0f} tokens"
    return RunWarning(reason=Reason.COMPLETIONS_CUT, message=message)


def _zero_gradient(steps: Sequence[Metrics]) -> RunWarning | None:
    if any(step["grad_norm"] != 0 for step in steps):
        return None
    masked = steps[-1].get("trained/sampling/importance_sampling_ratio/masked_fraction", 0.0)
    why = f"; importanceSamplingCorrection masks {masked:.0%} of it" if masked else ""
    message = f"all gradients of the last {WINDOW} steps are 0 although rewards differ{why}"
    return RunWarning(reason=Reason.ZERO_GRADIENT, message=message)
