"""Pushes of adapters to one real vLLM server with two workers: it samples from the model with the pushed adapters."""

import re

import pytest
import torch

from grpo_spec.lora import LoraConfig
from grpo_workload.generation.servers import weight_sender
from grpo_workload.generation.servers.errors import EngineDiffersError, EngineError
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.weights.export import Export
from support.trainer.corrupt import changing
from support.trainer.engines import Engines, largest_difference, make_contract, own_generator

pytestmark = pytest.mark.vllm

# The scale is no power of two, and vLLM cannot be set to exactly this rank.
LORA = LoraConfig(r=4, alpha=6, push="adapters")


@pytest.fixture(scope="module")
def adapters(model):
    return Adapters(model, LORA, seed=0)


@pytest.fixture(scope="module")
def generator(tiny_model, model, adapters, tmp_path_factory):
    contract = make_contract(tiny_model, [(2, 1)])
    contract = contract.model_copy(update={"config": contract.config.model_copy(update={"lora": LORA})})
    pods = Engines(tmp_path_factory.mktemp("engines"), contract)
    folder = tmp_path_factory.mktemp("group")
    with (
        pods.running(),
        own_generator(contract, lambda: Export(adapters.pushed(), is_partitioned=False), folder) as ready,
    ):
        yield ready


def change(adapters, seed):
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.trained():
            parameter.normal_(std=0.2, generator=random)


def push(generator, adapters, version):
    generator.sync_weights(Export(adapters.pushed(), is_partitioned=False), version)


def test_each_push_replaces_the_adapters(generator, model, adapters, monkeypatch):
    assert largest_difference(model, generator) < 1e-4, "the empty adapter changes the model"
    monkeypatch.setitem(weight_sender.PIECE_BYTES, "gloo", 2**11)  # an update takes several pieces
    for version in (1, 2):
        change(adapters, version)
        assert largest_difference(model, generator) > 1e-2
        push(generator, adapters, version)
        assert largest_difference(model, generator) < 1e-4


def test_an_abandoned_update_leaves_the_adapters_as_they_were(generator, model, adapters):
    (client,) = generator._link.clients
    push(generator, adapters, 3)
    generator._link.run(client.abandon_update())
    generator._link.run(client.resume())
    generator._link.run(client._call("POST", "/update_weight_version", json={"new_version": "3"}))
    assert largest_difference(model, generator) < 1e-4


def test_an_adapter_that_changes_on_its_way_is_refused_by_name(generator, model, adapters, monkeypatch):
    name = adapters.pushed()[0].name
    with monkeypatch.context() as patch:
        patch.setattr(weight_sender, "with_sums", changing(name, "ulps"))
        said = rf"^engine engine-0 .*weights altered: {re.escape(name)} changed"
        with pytest.raises(EngineError, match=said) as raised:
            push(generator, adapters, 4)
    assert not isinstance(raised.value, EngineDiffersError), "another attempt may go well"
    generator._pusher.with_engines(generator._pusher.join)  # abandons the update
    push(generator, adapters, 5)
    assert largest_difference(model, generator) < 1e-4


def test_modules_that_vllm_has_no_adapters_for_are_refused_by_name(generator, model, adapters):
    weights = [weight._replace(name=weight.name.replace("q_proj", "x_proj")) for weight in adapters.pushed()]
    with pytest.raises(
        EngineError, match=r"vLLM has no adapters for x_proj of this model, only for .*q_proj.* push merged would work"
    ):
        generator.sync_weights(Export(weights, is_partitioned=False), 5)
