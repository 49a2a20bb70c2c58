"""Vision-language models compute over packed sequences what transformers computes for each one alone, in float32."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grpo_spec.errors import ConfigError
from grpo_spec.inputs import VISION_FAMILIES
from grpo_spec.lora import LoraConfig
from grpo_workload.algorithm.micro_batch import filler, micro_batch
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model import attention, vision
from grpo_workload.policy.trials.memory_trial import longest_sample
from grpo_workload.policy.trials.trial import try_policy
from support.families import make_model
from support.trainer.places import config_of
from support.trainer.samples import make_sample
from support.trainer.stand_in_policy import stand_in_policy
from support.trainer.tiny_vision import END, FAMILIES, IMAGE, START, make_inputs, make_vision_model

attention.register()
TWIN = 262  # a word whose weights are those of the image's token


def make_sharp_model(family, implementation):
    model = make_vision_model(family)
    model.set_attn_implementation(implementation)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[TWIN] = layer.weight[IMAGE]
    return model


def with_images(family, sizes, completion):
    images, counts = make_inputs(family, sizes) if sizes else (None, [])
    ids = [40, 50, *(token for count in counts for token in [START, *[IMAGE] * count, END]), 60, 70]
    return make_sample(ids, completion, images=images)


def samples(family):
    return [
        with_images(family, [], [90, 91, 92]),
        with_images(family, [(2, 3)], [100, 101, 102, 103, 104]),
        with_images(family, [(1, 2), (3, 2)], [110, IMAGE, 112]),  # an image's token that was sampled
    ]


def with_groups(family):
    """Samples of which some have the same prompt, also one that another rank has sent."""
    text, one, two = samples(family)
    again = replace(one, completion=replace(one.completion, token_ids=(104, 103, 102, 101, 100)))
    return [one, text, two, again, pickle.loads(pickle.dumps(two.bare())), again.bare()]


def alone(model, sample):
    """Transformers' own values; a sampled token of an image is its twin, which is text."""
    prompt, images = sample.prompt.token_ids, sample.prompt.images
    completion = [TWIN if token == IMAGE else token for token in sample.completion.token_ids]
    ids = torch.tensor([[*prompt, *completion]])
    inputs = {} if images is None else {name: torch.from_numpy(array) for name, array in images.inputs.items()}
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)


def test_all_families_are_compared():
    assert set(FAMILIES) == set(VISION_FAMILIES)


@pytest.mark.parametrize("implementation", [attention.VARLEN, "sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_gradients_are_those_of_transformers(family, implementation):
    plain, packed = make_sharp_model(family, "eager").eval(), make_sharp_model(family, implementation).train()
    vision.adapt(packed)
    packed.gradient_checkpointing_enable({"use_reentrant": False})
    num_rows: list[int] = []
    next(iter(vision.tower(packed).values())).register_forward_pre_hook(
        lambda _module, args, kwargs: num_rows.append(len([*args, kwargs.get("pixel_values")][0])), with_kwargs=True
    )
    rows = LogprobHead(packed).per_token(packed, micro_batch(with_groups(family)), 1.0).logprobs_BT
    rows.sum().backward()
    pixels = [one.prompt.images.inputs["pixel_values"] for one in samples(family) if one.prompt.images]
    assert num_rows == [sum(map(len, pixels)) + len(pixels[1])], "the tower sees shared images once"
    for row, sample in zip(rows, with_groups(family), strict=True):
        expected = alone(plain, sample)
        expected.sum().backward()
        torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=0)
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is None:
            continue
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):  # the sum of what both words get
            for gradient in (ours.grad, theirs.grad):
                gradient[IMAGE] += gradient[TWIN]
                gradient[TWIN] = 0
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=1e-4, msg=lambda text, n=name: n + text)


@pytest.mark.parametrize("family", FAMILIES)
def test_halves_keep_their_images(family):
    model = make_sharp_model(family, attention.VARLEN)
    vision.adapt(model)
    head, batch = LogprobHead(model), micro_batch(with_groups(family))
    parts = torch.cat([head.per_token(model, half, 1.0).logprobs_BT for half in batch.halves()])
    torch.testing.assert_close(parts, head.per_token(model, batch, 1.0).logprobs_BT, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_micro_batch_without_images_gives_the_tower_gradients_of_0(family):
    """Ranks reduce the gradients of the same parameters, whatever prompts they have."""
    model = make_sharp_model(family, attention.VARLEN)
    vision.adapt(model)
    LogprobHead(model).per_token(model, filler(), 1.0).logprobs_BT.sum().backward()
    with_images = make_sharp_model(family, attention.VARLEN)
    vision.adapt(with_images)
    LogprobHead(with_images).per_token(with_images, micro_batch(samples(family)), 1.0).logprobs_BT.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in with_images.named_parameters():
        assert (gradients[name] is None) == (parameter.grad is None), name
    own = {f"{part}.{name}" for part, module in vision.tower(model).items() for name, _ in module.named_parameters()}
    assert not any(gradients[name].any() for name in own if gradients[name] is not None)


def test_a_frozen_tower_is_not_trained_and_other_models_have_none():
    model = make_vision_model("internvl")
    vision.freeze(model)
    trained = {name.split(".")[1] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"language_model", "weight"}
    with pytest.raises(ConfigError, match=r"model\.freezeVisionTower: llama has no vision tower"):
        vision.freeze(make_model("llama"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_tower_gets_no_adapters_and_engines_have_none_for_it(family, is_frozen):
    model = make_vision_model(family)
    names = list(vision.tower(model))
    Adapters(model, LoraConfig(), seed=0, excluded=names if is_frozen else [])
    adapted = {one for one, _ in model.named_parameters() if ".lora_" in one}
    assert any(one.startswith("model.language_model.") for one in adapted)
    for part in names:
        assert any(one.startswith(f"{part}.") for one in adapted) is not is_frozen
    if is_frozen:
        vision.check_adapters(model)
    else:
        with pytest.raises(ConfigError, match=r"lora\.push: adapters does not work for a vision tower"):
            vision.check_adapters(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trial_at_the_start_accepts_it(family):
    model = make_sharp_model(family, attention.VARLEN).to(torch.bfloat16)
    vision.adapt(model)
    try_policy(stand_in_policy(model), config_of())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_sequence_has_the_images_of_its_prompt(family):
    model = make_vision_model(family)
    vision.adapt(model)
    policy = SimpleNamespace(module=model)
    sample = longest_sample(policy, 80, 20, with_images(family, [(48, 32)], [1]).prompt)
    with torch.no_grad():
        logprobs_BT = LogprobHead(model).per_token(model, micro_batch([sample]), 1.0).logprobs_BT
    assert logprobs_BT.shape == (1, 20)
    assert logprobs_BT.isfinite().all()
