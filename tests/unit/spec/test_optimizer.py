"""Every schedule that the spec takes is one of transformers', with the arguments that transformers takes and needs."""

import inspect
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from grpo_spec.optimizer import SCHEDULE_ARGUMENTS, OptimizerConfig

FOLLOW_A_METRIC = {"reduce_lr_on_plateau", "greedy"}
SET_ELSEWHERE = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
WORDS = {"warmup_type", "decay_type"}  # of warmup_stable_decay; arguments here are numbers
NEEDED = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-7},
    "warmup_stable_decay": {"num_decay_steps": 4},
}


def test_the_schedules_and_their_arguments_are_those_of_transformers() -> None:
    of_transformers = {
        str(name.value): set(inspect.signature(function).parameters) - SET_ELSEWHERE - WORDS
        for name, function in TYPE_TO_SCHEDULER_FUNCTION.items()
        if name.value not in FOLLOW_A_METRIC
    }
    assert {name: set(arguments) for name, arguments in SCHEDULE_ARGUMENTS.items()} == of_transformers
    assert set(get_args(OptimizerConfig.model_fields["lr_scheduler_type"].annotation)) == set(of_transformers)


@pytest.mark.parametrize("schedule", SCHEDULE_ARGUMENTS)
def test_each_schedule_runs_with_what_it_needs(schedule: str) -> None:
    warmup = 0 if schedule == "constant" else 2
    config = OptimizerConfig(
        lr_scheduler_type=schedule, warmup_steps=warmup, lr_scheduler_kwargs=NEEDED.get(schedule, {})
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule_of_steps = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=10,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs),
    )
    rates = []
    for _ in range(10):
        rates.append(schedule_of_steps.get_last_lr()[0])
        optimizer.step()
        schedule_of_steps.step()
    assert max(rates) == pytest.approx(config.learning_rate)
    assert (rates[0] < rates[1]) == (warmup > 0)
    if schedule == "cosine_with_min_lr":
        assert min(rates[2:]) > 0.1 * config.learning_rate


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"lrSchedulerType": "polynomial", "lrSchedulerKwargs": {"lr_end": 0, "powr": 2}},
            "lr_end, power with polynomial",
        ),
        ({"lrSchedulerType": "cosine_with_min_lr"}, "needs lrSchedulerKwargs.min_lr, or min_lr_rate"),
        (
            {"lrSchedulerType": "cosine_with_min_lr", "lrSchedulerKwargs": {"min_lr": 0, "min_lr_rate": 0}},
            "needs lrSchedulerKwargs.min_lr, or min_lr_rate",
        ),
        ({"lrSchedulerType": "warmup_stable_decay"}, "needs lrSchedulerKwargs.num_decay_steps"),
        ({"lrSchedulerType": "reduce_lr_on_plateau"}, "Input should be"),
    ],
)
def test_what_a_schedule_would_ignore_or_miss_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        OptimizerConfig.model_validate(fields)
