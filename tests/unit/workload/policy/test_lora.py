"""Modules that may have adapters, the weights that they merge to, and the memory that merging takes."""

from itertools import accumulate

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch.profiler import ProfilerActivity, profile

from grpo_spec.errors import ConfigError
from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters import adapter_weights
from grpo_workload.policy.adapters.lora import Adapters, output_layers
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.weights.export import Export
from support.families import STATEFUL, make_model

IDS_BT = torch.arange(12).view(2, 6)


def llama(*, tied=False, **fields):
    return make_model("llama", tie_word_embeddings=tied, attention_bias=True, **fields)


def gpt2():
    return make_model("gpt2")


def train(model):
    """Change every trained parameter."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 8


def config(**fields):
    return LoraConfig.model_validate({"r": 3, "alpha": 12} | fields)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (llama, {}),
        (llama, {"targetModules": ["q_proj", "down_proj"], "modulesToSave": ["lm_head", "embed_tokens", "norm"]}),
        (llama, {"modulesToSave": ["mlp"]}),
        (llama, {"dropout": 0.5}),
        (lambda: llama(tied=True), {"modulesToSave": ["input_layernorm"]}),
        (gpt2, {}),
    ],
)
def test_merged_weights_compute_the_same_as_the_trained_model(make, fields):
    model, plain = make(), make()
    before = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    adapters = Adapters(model, config(**fields), seed=1)
    train(model)
    frozen = {name: parameter.clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    weights = dict(Export(adapters.pushed(), is_partitioned=False))
    assert weights.keys() == before.keys()
    plain.load_state_dict(weights, strict=False)
    model.eval()
    plain.eval()
    torch.testing.assert_close(model(IDS_BT).logits, plain(IDS_BT).logits, atol=1e-5, rtol=1e-5)
    assert all(parameter.equal(frozen[name]) for name, parameter in model.named_parameters() if name in frozen)

    initial = make().eval()
    model.train()
    assert not torch.allclose(model(IDS_BT).logits, initial(IDS_BT).logits, atol=1e-3)
    assert "dropout" not in fields or not model(IDS_BT).logits.equal(model(IDS_BT).logits)
    with adapters.disabled():
        torch.testing.assert_close(model(IDS_BT).logits, initial(IDS_BT).logits, atol=0, rtol=0)
    assert model.training
    assert {id(parameter) for parameter in adapters.trained()} == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h"])
def test_all_linear_leaves_out_the_layers_that_fused_kernels_of_mamba_bypass(family):
    adapters = Adapters(model := make_model(family), config(), seed=1)
    adapted = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert adapted >= {"in_proj", "q_proj", "o_proj", "down_proj"}
    assert "out_proj" not in adapted
    assert "conv1d" not in adapted
    train(model)
    plain = make_model(family)
    plain.load_state_dict(dict(Export(adapters.pushed(), is_partitioned=False)), strict=False)
    torch.testing.assert_close(model.eval()(IDS_BT).logits, plain.eval()(IDS_BT).logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(
        ConfigError, match=rf"lora.targetModules: an adapter of out_proj would take no part in a {family}"
    ):
        Adapters(make_model(family), config(targetModules=["out_proj"]), seed=1)


@pytest.mark.parametrize("family", [*STATEFUL, "llama4_text", "phimoe", "gemma3n_text"])
def test_each_adapter_of_all_linear_takes_part(family):
    """Some layers' weights are read past their modules, so past an adapter; some routers return more than a tensor."""
    Adapters(model := make_model(family), config(), seed=1)
    model(input_ids=IDS_BT, use_cache=False).logits.square().mean().backward()
    idle = {
        name.partition(".lora_B")[0].rpartition(".")[2]
        for name, parameter in model.named_parameters()
        if ".lora_B." in name and (parameter.grad is None or not parameter.grad.any())
    }
    assert idle == set()


def test_initial_values_depend_only_on_the_seed():
    def first(seed):
        torch.rand(3)
        return [parameter.detach() for parameter in Adapters(llama(), config(), seed=seed).trained()]

    state = torch.random.get_rng_state()
    once = first(1)
    torch.random.set_rng_state(state)
    assert all(a.equal(b) for a, b in zip(once, first(1), strict=True))
    assert not all(a.equal(b) for a, b in zip(once, first(2), strict=True))


def test_training_begins_with_saved_adapters_which_must_be_of_the_model(tmp_path):
    """They keep their own r and modules."""
    before = peft.get_peft_model(llama(), peft.LoraConfig(r=5, lora_alpha=7, target_modules=["q_proj", "up_proj"]))
    train(before)
    before.save_pretrained(tmp_path / "saved")
    expected = dict(before.merge_and_unload().named_parameters())
    adapters = Adapters(llama(), config(path=str(tmp_path / "saved")), seed=1)
    assert len(adapters.trained()) == 2 * 2 * 2
    for name, weight in Export(adapters.pushed(), is_partitioned=False):
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0)

    def refused(model, message, folder="saved", excluded=()):
        with pytest.raises(ConfigError, match=rf"^lora\.path: .*{message}"):
            Adapters(model, config(path=str(tmp_path / folder)), seed=1, excluded=excluded)

    refused(llama(), "has no adapter_model.safetensors", "none")
    refused(llama(intermediate_size=32), "size mismatch")
    refused(llama(num_hidden_layers=3), "are not of this model, for example .*layers.2")
    refused(gpt2(), "the model has no module q_proj")
    refused(llama(), "freezeVisionTower", excluded=("mlp",))


def test_both_output_layers_give_logprobs():
    adapters = Adapters(model := llama(), config(modulesToSave=["lm_head"]), seed=1)
    train(model)
    head = LogprobHead(model, output_layers(model))
    model.eval()
    targets_K = torch.tensor([3, 1, 4])

    def check():
        expected = model(IDS_BT).logits.flatten(0, 1)[:3].log_softmax(-1).gather(1, targets_K.unsqueeze(1)).squeeze(1)
        with head.targets(torch.arange(3), targets_K, 1.0):
            torch.testing.assert_close(model(IDS_BT).logits[:, 0], expected)

    check()
    with adapters.disabled():
        check()


def test_merging_allocates_at_most_two_weights_and_a_slice(monkeypatch):
    monkeypatch.setattr(adapter_weights, "SLICE_ELEMENTS", 4096)
    adapters = Adapters(model := llama(hidden_size=256, intermediate_size=512).bfloat16(), config(), seed=1)
    train(model)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    kept = None  # a consumer holds a weight until it has the next one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _, weight in Export(adapters.pushed(), is_partitioned=False):
            kept = weight
    assert kept is not None
    # Earlier allocations have no events here, so the sum is the memory in use on top of the model.
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    alive = list(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    slices = 4 * 4 * 4096  # float32 slices of the weight, the factors and their product
    assert largest < max(alive) < 2 * largest + slices
    assert slices < largest / 2


@pytest.mark.parametrize(
    ("tied", "field", "modules", "message"),
    [
        (True, "modulesToSave", ["lm_head"], "lm_head has the weight .* share .* Others would work: .*norm"),
        (True, "modulesToSave", ["embed_tokens"], "embed_tokens has the weight"),
        (True, "targetModules", ["embed_tokens"], "embed_tokens has the weight .* would work: down_proj, .*q_proj"),
        (False, "targetModules", ["q_proj", "w_proj"], "the model has no module w_proj; it has down_proj, "),
        (False, "modulesToSave", ["score"], "the model has no module score; it has .*lm_head"),
        (False, "targetModules", ["lm_head"], r"lm_head computes logits.*modulesToSave: \[lm_head\] would work"),
        (False, "targetModules", ["mlp"], "mlp is not a linear layer; down_proj, .* would work"),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused_with_alternatives(tied, field, modules, message):
    with pytest.raises(ValueError, match=rf"lora\.{field}: {message}"):
        Adapters(llama(tied=tied), config(**{field: modules}), seed=1)


def test_what_peft_refuses_is_refused_in_its_words():
    with pytest.raises(ValueError, match="lora: peft refuses these settings: No modules were targeted"):
        Adapters(llama(), config(modulesToSave=["layers"]), seed=1)


def test_pushed_adapters_have_the_names_of_modules_and_a_scaled_b():
    model = llama()
    adapters = Adapters(model, LoraConfig(r=4, alpha=6, push="adapters"), seed=0)
    train(model)
    pushed = {name: weight.clone() for name, weight in Export(adapters.pushed(), is_partitioned=False)}
    saved = {
        name.removeprefix("base_model.model.").replace(".default.", "."): weight
        for name, weight in Export(adapters.saved(), is_partitioned=False)
    }
    assert pushed.keys() == saved.keys()
    for name, weight in pushed.items():
        assert torch.equal(weight, saved[name] * (1.5 if ".lora_B." in name else 1.0)), name
