"""Whatever vLLM makes of weights when it loads them must be made again by a push; tables and caches need not.

Weights that a push left in an engine's model are compared where they can be; a model of 8-bit weights passes.
"""

from array import array
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from grpo_workload.generation.audit import audited, check_derived, check_same, rows_of
from grpo_workload.generation.derived import Push, followed
from grpo_workload.weights.differ import WeightsDifferError
from grpo_workload.weights.digest import with_sums


class Kernel:
    """As vLLM's: an object that belongs to a layer."""

    __module__ = "vllm.model_executor.kernels"

    def __init__(self, scale):
        self.scale = scale
        self.refers = [self]


class Layer(nn.Module):
    """Keeps its weights in many forms."""

    config = PreTrainedConfig()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2), requires_grad=False)
        self.register_buffer("view", self.weight.view(2, 4), persistent=False)
        self.register_buffer("table", torch.outer(torch.arange(4.0), torch.ones(2)).cos(), persistent=False)
        self.scaled = torch.zeros(4, 2)
        self.factors = [torch.ones(2)]

    def load(self, value, stale=""):
        """As vLLM does when it loads weights, first or later; `stale` is not made again."""
        loaded = torch.frombuffer(array("f", [value] * 8), dtype=torch.float32).view(4, 2)
        self.weight.data.copy_(loaded)
        made: dict[str, Callable[[], object]] = {
            "view": lambda: self.view.copy_(self.weight.view(2, 4)),
            "packed": lambda: setattr(self, "packed", self.weight.t().contiguous()),
            "scaled": lambda: torch.mul(self.weight, 2, out=self.scaled),
            "rows.1": lambda: setattr(self, "rows", [torch.ones(1), self.weight.sum(0)]),
            "kernel.scale": lambda: setattr(self, "kernel", Kernel(self.weight.amax(1))),
            "multiply.packed": lambda: setattr(self, "multiply", multiply_by(self.weight.neg())),
            "add.other": lambda: setattr(self, "add", partial(torch.add, other=self.weight.abs())),
        }
        for name, make in made.items():
            if name != stale:
                make()
        if not hasattr(self, "limits"):  # made once, and of no weights
            self.limits, self.workspace = torch.tensor([1.7, 1.7]) * self.factors[0], torch.zeros_like(self.weight)
            self.order = self.weight.flatten().argsort()  # integers may stay: no kernel takes them for weights
            self.weight.data = self.weight.data.clone()  # in other memory than the view


def multiply_by(packed):
    return lambda x: x * packed


@pytest.fixture
def model():
    made = Layer()
    with followed(made):
        made.load(1.0)
    made.kv_cache = torch.randn(2)  # what comes later is not made of weights
    return made


def push(model, stale=""):
    with Push(model) as done:
        model.load(2.0, stale)
    return done


@pytest.mark.parametrize(
    "stale", ["view", "packed", "scaled", "rows.1", "kernel.scale", "multiply.packed", "add.other"]
)
def test_what_a_push_leaves_as_it_was_ends_the_job(model, stale):
    with pytest.raises(WeightsDifferError, match=f"^weights differ: a push leaves {stale} as vLLM made it "):
        check_derived(model, push(model, stale))


def test_two_pushes_that_change_everything_are_enough(model):
    check_derived(model, push(model))
    for _ in range(2):  # as if the first forward pass had made a tensor that the second push leaves as it is
        with pytest.raises(WeightsDifferError, match="a push leaves packed as"):
            check_derived(model, push(model, "packed"))
    check_derived(model, push(model))
    check_derived(model, push(model, "packed"))


def test_what_was_made_of_weights_that_are_never_pushed_may_stay():
    both = nn.ModuleDict({"tower": Layer(), "text": Layer()})
    with followed(both):
        for layer in both.values():
            layer.load(1.0)
    with Push(both) as done:
        both["text"].load(2.0, "packed")
    assert done.finish(frozen=["tower"]) == ["text.packed"]


class Quantized(nn.Module):
    """As vLLM holds a layer that it has quantized."""

    config = PreTrainedConfig()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)

    def load_weights(self, weights):
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
