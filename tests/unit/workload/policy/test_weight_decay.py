"""Weight decay spares what transformers' `Trainer` spares, in every family, and is that of AdamW with two groups."""

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

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
