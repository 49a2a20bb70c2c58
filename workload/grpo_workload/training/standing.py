"""The best evaluation of a run so far, and whether the run ends early: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_spec.errors import ConfigError
from grpo_spec.evaluation import EvaluationConfig
from grpo_spec.reports import EvaluationProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The course of `metricForBestModel` over the evaluations of a run."""

    metric: str
    step: int  # steps taken before the last evaluation
    value: float  # that of the last evaluation
    best_step: int | None  # None while no evaluation has a value
    best: float
    stops: bool  # earlyStoppingPatience is used up
    saves_best: bool

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is saved after `step` steps since they gave the best evaluation."""
        return self.saves_best and self.best_step == step

    def progress(self) -> EvaluationProgress:
        """Return it as the launcher reports it."""
        value = None if math.isnan(self.value) else self.value
        best = None if self.best_step is None else self.best
        return EvaluationProgress(
            step=self.step, metric=self.metric, value=value, best_step=self.best_step, best=best, stops=self.stops
        )


def standing(section: EvaluationConfig, past: Mapping[int, Mapping[str, float]]) -> Standing | None:
    """Compare the evaluations `past`, by number of steps; None before the first. The first of equal values is best.

    Raises:
        ConfigError: no evaluation has the metric `metricForBestModel`.
    """
    if not past:
        return None
    metric, sign = section.metric_for_best_model, 1 if section.greater_is_better else -1
    best_step, best, waited = None, math.nan, 0
    for step in sorted(past):
        if metric not in past[step]:
            known = ", ".join(sorted(name for name in past[step] if name.startswith("eval/")))
            raise ConfigError(f"evaluation.metricForBestModel: there is no metric {metric}; there are {known}")
        value = past[step][metric]
        waited += 1
        if not math.isnan(value) and (best_step is None or sign * value > sign * best):
            best_step, best, waited = step, value, 0
    patience = section.early_stopping_patience
    return Standing(
        metric=metric,
        step=step,
        value=value,
        best_step=best_step,
        best=best,
        stops=patience is not None and best_step is not None and waited >= patience,
        saves_best=section.save_best,
    )
