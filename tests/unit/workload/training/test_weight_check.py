"""An engine computes after a push what the trainer does: numbers that are none are refused, too."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo_workload.training.weight_check import WeightCheck
from grpo_workload.weights.differ import WeightsDifferError
from support.trainer.places import config_of

pytestmark = pytest.mark.usefixtures("only_rank")

TOKENS = 8


class Model(nn.Module):
    """Gives each token the log-probability -1, before rounding."""

    def __init__(self, gain):
        super().__init__()
        self.layer, self.gain = nn.Linear(1, 1, bias=False), gain
        nn.init.ones_(self.layer.weight)

    def forward(self):
        return -1 + self.gain * (self.layer(torch.ones(1, TOKENS - 1, 1))[..., 0] - 1)


@torch.no_grad()
def check(values, gain=0.0, **engine_args):
    """Run the check with engines, by name, of which each token has the log-probability given.

    The trainer's is -1; rounding, by 1e-7, moves it by `gain` times as much.
    """
    config = config_of(model={"name": "m", "dtype": "bfloat16"}, generation={"engineArgs": engine_args})
    model = Model(gain)
    policy = SimpleNamespace(logprobs=lambda batch: model(), module=model)
    engines = SimpleNamespace(logprobs=lambda ids: {name: [value] * (TOKENS - 1) for name, value in values.items()})
    WeightCheck(config, lambda text, **_: {"input_ids": [*range(TOKENS)]}).run(policy, engines, 0)


def test_engines_that_compute_the_same_are_accepted():
    check({"one": -1.0, "two": -1.0009})


def test_rounding_explains_no_more_than_it_does_to_the_trainers_own_numbers():
    different = {"one": -1.0, "two": -1.2}
    check(different, gain=1e6)
    with pytest.raises(WeightsDifferError, match=r"differ by 0\.2 nats on average .* at most 0\.05 is rounding"):
        check(different, gain=1.0)
    with pytest.raises(WeightsDifferError, match=r"differ by 0\.4 nats on average .* at most 0\.3 is rounding"):
        check({"one": -1.4}, gain=1e8)


def test_where_an_engine_rounds_more_the_trainers_rounding_is_no_measure():
    check({"one": -1.2}, kv_cache_dtype="fp8")
    check({"one": -1.9}, quantization="fp8")
    with pytest.raises(WeightsDifferError, match=r"at most 0\.05 is rounding"):
        check({"one": -1.2}, kv_cache_dtype="auto")


@pytest.mark.parametrize("wrong", [-2.0, float("nan"), float("-inf")])
def test_the_engine_that_differs_is_named(wrong):
    with pytest.raises(WeightsDifferError, match="version 0, two gives 8 fixed tokens"):
        check({"one": -1.0, "two": wrong, "three": -1.5})
