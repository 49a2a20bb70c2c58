"""MLPs in tiles and offloaded activations give the same outputs and gradients; each token is computed as often.

Streams and memory are tested on a GPU (tests/gpu/test_kernels.py).
"""

from contextlib import nullcontext

import peft
import pytest
import torch
from torch import Tensor

from grpo_workload.policy.memory import activation_offload
from grpo_workload.policy.memory.activation_offload import Activations
from grpo_workload.policy.model import tiles
from support.families import make_model

TOKENS = 33


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 7)
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)


def made(family, *, lora=None, **fields):
    """Return a model as a policy makes it, with adapters if `lora` says their dropout."""
    torch.manual_seed(0)
    model = make_model(family, **fields).float()
    tiles.wrap(model)
    if lora is not None:
        settings = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=lora, init_lora_weights=False)
        peft.get_peft_model(model, settings)
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": lora is not None})
    return model.train()


def passes(model, *, on, offloads=False):
    """Return loss, gradients, and the tokens that the first layer of the first MLP was given."""
    tiles.turn(model, on=on)
    model.zero_grad()
    given: list[int] = []
    layer = next(next(tiles.wrapped(model)).children())
    handle = layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].size(-2)))
    ids = torch.randint(3, 100, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with Activations(torch.device("cpu")).offloaded() if offloads else nullcontext():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    handle.remove()
    assert max(given) == (tiles.TILE if on else TOKENS)
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return loss.detach(), gradients, sum(given)


def compare(model, **options):
    """Compare both ways, and return the tokens that each has computed."""
    (loss, gradients, whole), (own, found, tiled) = passes(model, on=False), passes(model, on=True, **options)
    torch.testing.assert_close(own, loss, rtol=1e-6, atol=1e-6)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    return whole, tiled


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "deepseek_v3", "nemotron", "adapters"])
@pytest.mark.parametrize("offloads", [False, True])
def test_gradients_are_the_same_and_each_tile_is_computed_twice(family, offloads):
    model = made("llama", lora=0.0) if family == "adapters" else made(family)
    assert compare(model, offloads=offloads) == (2 * TOKENS, 2 * TOKENS)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen2_moe"])
def test_what_needs_the_output_of_the_mlp_has_it_computed_once_more(family):
    assert compare(made(family)) == (2 * TOKENS, 3 * TOKENS)  # a norm, and a gate


def test_dropout_of_adapters_is_the_same_when_a_tile_is_computed_again():
    model = made("llama", lora=0.5)
    tiles.turn(model, on=True)
    first = next(tiles.wrapped(model))
    seen: list[Tensor] = []
    first.gate_proj.lora_dropout["default"].register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    passes(model, on=True)
    forward, again = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert {tuple(one.flatten().tolist()) for one in forward} == {tuple(one.flatten().tolist()) for one in again}
    assert any((one == 0).any() for one in forward)


def test_short_micro_batches_and_passes_without_gradients_do_as_they_did():
    model, ids = made("llama"), torch.arange(3, 3 + TOKENS).unsqueeze(0)
    with torch.no_grad():
        tiles.turn(model, on=False)
        expected = model(input_ids=ids).logits
        tiles.turn(model, on=True)
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-6, atol=1e-6)
    short = model(input_ids=ids[:, :7], use_cache=False).logits
    tiles.turn(model, on=False)
    assert torch.equal(short, model(input_ids=ids[:, :7], use_cache=False).logits)


def test_experts_their_routers_and_vision_towers_stay_as_they_are():
    expected = {
        "mixtral": [],
        "qwen3_moe": [],
        "gpt_oss": [],
        "deepseek_v3": ["DeepseekV3MLP"],
        "gemma3": ["Gemma3MLP"],
    }
    for family, names in expected.items():
        assert {type(mlp).__name__ for mlp in tiles.wrapped(made(family, whole=True))} == set(names)


LAYERS = 6


@pytest.fixture
def model():
    built = make_model("qwen2", num_hidden_layers=LAYERS)
    built.gradient_checkpointing_enable({"use_reentrant": False})
    return built.train()


def gradient(model, context):
    model.zero_grad()
    with context:
        logits = model(input_ids=torch.arange(50).unsqueeze(0), use_cache=False).logits
    logits.log_softmax(-1).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_gradients_are_bitwise_equal_in_every_step(model):
    moving, plain = Activations(torch.device("cpu")), gradient(model, nullcontext())
    for _ in range(2):
        assert torch.equal(gradient(model, moving.offloaded()), plain)
    parked = [one for one in moving._parked if one.host.shape == (1, 50, 128)]
    assert len(parked) >= LAYERS
    assert all(one.back is None for one in parked), "a copy on the device was kept after its use"


def test_small_and_shared_tensors_and_weights_are_not_offloaded(model, monkeypatch):
    monkeypatch.undo()
    moving = Activations(torch.device("cpu"))
    gradient(model, moving.offloaded())
    assert moving._parked == []
