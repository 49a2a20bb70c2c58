"""Offloaded activations come back unchanged. Streams and memory are tested on a GPU (tests/gpu/test_kernels.py)."""

from contextlib import nullcontext

import pytest
import torch

from grpo_workload.policy.memory import activation_offload
from grpo_workload.policy.memory.activation_offload import Activations
from support.families import make_model

LAYERS = 6


@pytest.fixture
def model():
    built = make_model("qwen2", num_hidden_layers=LAYERS)
    built.gradient_checkpointing_enable({"use_reentrant": False})
    return built.train()


def gradient(model, context) -> torch.Tensor:
    model.zero_grad()
    with context:
        logits = model(input_ids=torch.arange(50).unsqueeze(0), use_cache=False).logits
    logits.log_softmax(-1).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_gradients_are_bitwise_equal_in_every_step(model, monkeypatch):
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    moving, plain = Activations(torch.device("cpu")), gradient(model, nullcontext())
    for _ in range(2):
        assert torch.equal(gradient(model, moving.offloaded()), plain)
    parked = [one for one in moving._parked if one.host.shape == (1, 50, 128)]
    assert len(parked) >= LAYERS
    assert all(one.back is None for one in parked), "a copy on the device was kept after its use"


def test_small_and_shared_tensors_and_weights_are_not_offloaded(model):
    moving = Activations(torch.device("cpu"))
    gradient(model, moving.offloaded())
    assert moving._parked == []
