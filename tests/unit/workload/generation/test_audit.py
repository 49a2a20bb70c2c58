"""Weights that a push left in an engine's model are compared where they can be; a model of 8-bit weights passes."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from grpo_workload.generation.audit import audited, check_same, rows_of
from grpo_workload.weights.differ import WeightsDifferError
from grpo_workload.weights.digest import with_sums


class Quantized(nn.Module):
    """As vLLM holds a layer that it has quantized."""

    config = PreTrainedConfig()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.weight.data = dict(weights)["weight"].to(torch.float8_e4m3fn)
        return {"weight"}


@pytest.mark.parametrize("is_initial", [True, False])
def test_weights_that_the_engine_quantizes_are_loaded(is_initial):
    model = Quantized()
    with audited(model, is_initial=is_initial, is_quantized=True):
        model.load_weights(with_sums([("weight", torch.full((4, 4), 2.0))], "cpu"))
    assert torch.equal(model.weight.float(), torch.full((4, 4), 2.0))


def test_a_parameter_that_was_replaced_by_other_values_is_named():
    model = nn.Linear(3, 2)
    before = rows_of(model)
    check_same(model, before)
    with torch.no_grad():
        model.weight[1] *= 1.5
    with pytest.raises(WeightsDifferError, match=r"others in weight \(by \d+%\)"):
        check_same(model, before)
