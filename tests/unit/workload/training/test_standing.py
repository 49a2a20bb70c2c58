"""The best evaluation, the saving of its checkpoint, and the early end of a run."""

import math
from typing import Any

import pytest

from grpo_spec.errors import ConfigError
from grpo_spec.evaluation import EvaluationConfig
from grpo_workload.training.standing import Standing, standing


def after(*values: float, **settings: Any) -> Standing | None:
    """Return the standing after evaluations with these values, 10 steps apart."""
    gym = {"reasoningGym": {"dataset": "basic_arithmetic"}}
    section = EvaluationConfig.model_validate({"dataset": gym, "everySteps": 10} | settings)
    return standing(section, {10 * number: {"eval/reward": value} for number, value in enumerate(values)})


def test_the_first_of_the_best_values_counts():
    assert after() is None
    found = after(0.1, 0.5, 0.5, 0.2)
    assert (found.best_step, found.best, found.step, found.value) == (10, 0.5, 30, 0.2)
    lowest = after(0.1, 0.5, greaterIsBetter=False)
    assert lowest.best_step == 0


def test_what_has_no_value_is_not_the_best():
    found, unknown = after(math.nan, -1.0, math.nan), after(math.nan, earlyStoppingPatience=1)
    assert (found.best_step, found.progress().value) == (10, None)
    assert (unknown.best_step, unknown.progress().best, unknown.stops) == (None, None, False)


def test_the_best_is_saved_unless_it_shall_not_be():
    better, worse, unsaved = after(0.1, 0.5), after(0.5, 0.1), after(0.1, 0.5, saveBest=False)
    assert [one and one.saves(10) for one in (better, worse, unsaved)] == [True, False, False]


@pytest.mark.parametrize(
    ("values", "stops"), [((0.1, 0.2, 0.1), False), ((0.2, 0.1, 0.2), True), ((0.2, 0.1, 0.3), False)]
)
def test_it_ends_after_so_many_evaluations_without_a_better_one(values, stops):
    found, patient = after(*values, earlyStoppingPatience=2), after(*values)
    assert (found.stops, patient.stops) == (stops, False)


def test_an_unknown_metric_is_named_with_those_there_are():
    with pytest.raises(
        ConfigError, match="metricForBestModel: there is no metric eval/accuracy; there are eval/reward"
    ):
        after(0.1, metricForBestModel="eval/accuracy")
