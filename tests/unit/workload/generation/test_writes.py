"""What loaders do with weights is learnt, proved at each push, and no difference where they change them first."""

import math

import pytest
import torch
from torch import nn

from grpo_workload.generation.copies import Copies
from grpo_workload.generation.writes import Writes
from grpo_workload.weights.differ import WeightsDifferError
from grpo_workload.weights.digest import with_sums


class OfAnotherRank(nn.Module):
    """Adds a bias on one of several ranks alone, so another has zeros in place of it: vLLM's GPT-OSS does so."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 8), requires_grad=False)

    def load_weights(self, weights):
        for _, weight in weights:
            weight.zero_()
            self.bias.copy_(weight)


def test_a_loader_may_change_what_has_arrived():
    model = OfAnotherRank()
    for _ in range(3):
        writes = Writes(model, is_quantized=False)
        with torch.no_grad(), writes:
            sent = with_sums([("bias", torch.randn(4, 8))], "cpu")
            writes.load(model.load_weights, ((name, tensor.clone()) for name, tensor in sent))
        writes.check_arrived()
        writes.check_kept()


class Fused(nn.Module):
    """Stacks two weights, as vLLM's attention does, and takes the last columns of a third, as one of several ranks."""

    def __init__(self):
        super().__init__()
        self.stacked = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.part = nn.Parameter(torch.zeros(6, 2), requires_grad=False)
        self.forgets = False

    def load_weights(self, weights):
        places = {"q": self.stacked[:4], "k": self.stacked[4:], "o": self.part}
        for name, weight in weights:
            if not (self.forgets and name == "k"):
                places[name].copy_(weight[:, -2:] if name == "o" else weight)


def push(model, names="qko"):
    writes, shapes = Writes(model, is_quantized=False), {"q": (4, 4), "k": (4, 4), "o": (6, 6)}
    with torch.no_grad(), writes:
        flat = torch.randn(sum(math.prod(shapes[name]) for name in names))  # weights come in one piece of memory
        parts = flat.split([math.prod(shapes[name]) for name in names])
        weights = [(name, part.view(shapes[name])) for name, part in zip(names, parts, strict=True)]
        writes.load(model.load_weights, with_sums(weights, "cpu"))
    writes.check_arrived()
    writes.check_kept()
    return writes


def test_after_two_pushes_alike_copies_are_proved_without_following(monkeypatch):
    model, followed = Fused(), []
    enter = Copies.__enter__
    monkeypatch.setattr(Copies, "__enter__", lambda self: followed.append(1) or enter(self))
    for _ in range(4):
        push(model)
    assert len(followed) == 2
    model.forgets = True
    with pytest.raises(WeightsDifferError, match="stacked does not hold"):
        push(model)
    model.forgets = False
    with pytest.raises(WeightsDifferError, match="the push has no k, which earlier ones had"):
        push(model, "qo")
    push(model)
    assert len(followed) == 2


def test_a_loader_that_computes_is_followed_at_each_push(monkeypatch):
    class Computes(Fused):
        def load_weights(self, weights):
            super().load_weights((name, -weight if name == "q" else weight) for name, weight in weights)

    followed, enter = [], Copies.__enter__
    monkeypatch.setattr(Copies, "__enter__", lambda self: followed.append(1) or enter(self))
    model = Computes()
    for _ in range(4):
        push(model)
    assert len(followed) == 4


def test_a_layer_that_keeps_its_weights_in_another_type_is_no_difference():
    model = OfAnotherRank()
    for _ in range(3):
        model.bias = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        writes = Writes(model, is_quantized=True)
        with torch.no_grad(), writes:
            writes.load(model.load_weights, with_sums([("bias", torch.randn(4, 8))], "cpu"))
        model.bias = nn.Parameter(model.bias.half(), requires_grad=False)
        writes.check_arrived()
        writes.check_kept()
