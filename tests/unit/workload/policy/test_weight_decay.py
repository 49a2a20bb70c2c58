"""Weight decay spares what transformers' `Trainer` spares, in every family; it is that of AdamW with two groups.

AdamW with moments in 8 bits is bitsandbytes', for any tensor, and takes moments of a converted checkpoint.
"""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from grpo_spec.optimizer import INT8_MOMENTS
from grpo_spec.training import TrainingConfig
from grpo_workload.policy.step import int8_moments
from grpo_workload.policy.step.int8_moments import Int8Adam, as_plain, plain_moments_arrive
from grpo_workload.policy.step.weight_decay import decay_weights, decaying
from support.families import FAMILIES, MASKED, STATEFUL, make_model


@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL, *MASKED])
def test_the_same_parameters_are_spared_as_by_transformers(family):
    model = make_model(family)
    trained = dict(model.named_parameters())
    expected = set(Trainer.get_decay_parameter_names(None, model)) & trained.keys()
    assert set(decaying(model)) == expected
    assert set() < expected <= trained.keys()  # OLMo's norms have no weights, so that all decay


def test_adapters_decay_but_what_is_frozen_and_saved_norms_do_not():
    model = get_peft_model(make_model("llama"), LoraConfig(modules_to_save=["norm"]))
    names = set(decaying(model))
    assert names
    assert all("lora_" in name for name in names)


def test_weights_are_bit_for_bit_those_of_adamw_with_two_groups():
    ours = make_model("starcoder2").eval()  # with biases, and norms that only their class shows
    theirs = deepcopy(ours)
    adam = torch.optim.AdamW(ours.parameters(), lr=0.1, weight_decay=0.0)
    decay_weights(adam, ours, 0.5)
    names = Trainer.get_decay_parameter_names(None, theirs)
    kept, spared = (
        [each for name, each in theirs.named_parameters() if (name in names) == decays] for decays in (True, False)
    )
    groups = [{"params": kept, "weight_decay": 0.5}, {"params": spared, "weight_decay": 0.0}]
    both = ((ours, adam), (theirs, torch.optim.AdamW(groups, lr=0.1)))
    for step in range(3):
        for model, optimizer in both:
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = 0.1 / (step + 1)
            model(input_ids=torch.arange(3, 30).unsqueeze(0), labels=torch.arange(3, 30).unsqueeze(0)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = theirs.state_dict()
    assert all(weight.equal(expected[name]) for name, weight in ours.state_dict().items())


TRAINING = TrainingConfig(learning_rate=1e-2, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.5)
COUNT = 4 * 4096 + 300  # elements: the last block is not whole


@pytest.fixture(params=[2**30, 4096])
def piece(request, monkeypatch):
    """Elements that one call of bitsandbytes updates: all, or a part of them."""
    monkeypatch.setattr(int8_moments, "PIECE", request.param)
    return request.param


def stepped(make, sizes=(COUNT, 100), steps=4):
    """Return weights after some steps with random gradients, and the optimizer."""
    random = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size, generator=random)) for size in sizes]
    optimizer = make(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=random)
        optimizer.step()
    return weights, optimizer


def bitsandbytes_own(weights):
    return int8_moments.AdamW8bit(weights, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)


def test_steps_are_those_of_bitsandbytes_bit_for_bit(piece):
    ours, optimizer = stepped(lambda weights: Int8Adam(weights, TRAINING))
    theirs, other = stepped(bitsandbytes_own)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)
        assert optimizer.state[mine].keys() == other.state[its].keys()
        for name, value in other.state[its].items():
            assert torch.equal(torch.as_tensor(optimizer.state[mine][name]), torch.as_tensor(value)), name
    state = optimizer.state[ours[0]]
    kept = sum(state[name].nbytes for name in ("state1", "state2", "absmax1", "absmax2"))
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)
    assert kept == pytest.approx(INT8_MOMENTS * COUNT, rel=1e-3)
    assert optimizer.state[ours[1]]["state1"].dtype == torch.float32, "small tensors keep theirs whole"


def test_moments_of_a_converted_checkpoint_become_8_bits_when_they_arrive(piece):
    weights, saved = stepped(lambda given: Int8Adam(given, TRAINING))
    plain = {weight: as_plain(state) for weight, state in saved.state.items()}
    assert {float(state["step"]) for state in plain.values()} == {4.0}
    fresh = Int8Adam(weights, TRAINING)
    mapping = SimpleNamespace(optim_fragment={"exp_avg": weights[0]})
    module = SimpleNamespace(parameters=lambda: [SimpleNamespace(_hp_mapping=mapping)])
    engine = SimpleNamespace(optimizer=fresh, module=module)
    with plain_moments_arrive(engine):
        for weight, state in plain.items():
            for name, value in state.items():
                fresh.state[weight][name] = value
    assert mapping.optim_fragment == {}, "DeepSpeed would hold the moments in float32"
    for weight, state in saved.state.items():
        arrived = fresh.state[weight]
        assert arrived.keys() == state.keys()
        assert arrived["step"] == 4
        assert arrived["state1"].dtype == state["state1"].dtype
        again = as_plain(arrived)
        for name in ("exp_avg", "exp_avg_sq"):
            assert (again[name] - plain[weight][name]).norm() <= 0.01 * plain[weight][name].norm(), name
    assert fresh.param_groups[0]["params"] == weights


def test_a_saved_state_is_read_as_it_is_in_the_file():
    weights, optimizer = stepped(lambda given: Int8Adam(given, TRAINING))
    for place, state in optimizer.state_dict()["state"].items():
        live = as_plain(optimizer.state[weights[place]])
        assert all(torch.equal(value, live[name]) for name, value in as_plain(state).items())
