"""Training computes what transformers does by itself, family by family: log-probabilities and gradients, in float32.

Here sequences are packed if the family allows it, in training mode, with the family's attention and by slices of the
vocabulary; there each is alone, with eager attention and whole logits.
"""

import pytest
import torch
from torch import Tensor, nn

from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.penalties import Penalties
from grpo_workload.algorithm.truncation import Truncation
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model import attention, attention_blocks
from grpo_workload.policy.model.load import remove_noise
from grpo_workload.policy.trials.trial import try_policy
from support.families import FAMILIES, MASKED, SIZES, STATEFUL, make_model
from support.trainer.places import config_of
from support.trainer.samples import make_sample, random_samples
from support.trainer.stand_in_policy import stand_in_policy

attention.register()
ALL = [*FAMILIES, *STATEFUL, *MASKED]


def samples():
    return random_samples((3, 19), (6, 1), (1, 15))  # longer than the families' windows


def make_sharp_model(family, implementation):
    """Make weights large enough that soft caps, sinks and windows show."""
    model = make_model(family)
    model.set_attn_implementation(implementation)
    attention.check_layers(model.config, implementation, packs=family in FAMILIES)
    attention.keep_bounds(model)
    remove_noise(model)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    return model


def alone(model, sample):
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.completion.token_ids]])
    first = len(sample.prompt.token_ids)
    logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
    logprobs: Tensor = logits.log_softmax(-1).gather(1, ids[0, first:].unsqueeze(1)).squeeze(1)
    return logprobs


def attention_of(family):
    return "eager" if family in MASKED else attention.VARLEN


def test_layers_with_a_state_get_no_bounds_of_their_one_sequence():
    """transformers 5.20 refuses them without flash-linear-attention; attention knows them from the model's call."""
    model = make_sharp_model("qwen3_next", attention.VARLEN)
    seen: set[str] = set()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True)
    LogprobHead(model).per_token(model, micro_batch(samples()[:1]), 1.0)
    assert seen
    assert not seen & {*attention.BOUNDS}


OWN = [(family, attention_of(family)) for family in ALL]
OTHER = [(family, other) for family in ("llama", "qwen2", "mistral") for other in ("sdpa", "eager")]


@pytest.mark.parametrize(("family", "implementation"), [*OWN, *OTHER])
def test_log_probabilities_and_gradients_are_those_of_transformers(family, implementation, monkeypatch):
    monkeypatch.setattr(attention_blocks, "ROWS", 16)
    plain, packed = make_sharp_model(family, "eager").eval(), make_sharp_model(family, implementation)
    lists = [name for name, one in packed.named_modules() if isinstance(one, nn.ModuleList | nn.ModuleDict)]
    assert not any(name.endswith("experts") for name in lists), "under ZeRO-3, ranks would gather different experts"
    packed.train()
    packed.gradient_checkpointing_enable({"use_reentrant": False})
    head, rows = LogprobHead(packed), []
    for batch in [samples()] if family in FAMILIES else [[sample] for sample in samples()]:
        logprobs_BT = head.per_token(packed, micro_batch(batch), 1.0).logprobs_BT
        logprobs_BT.sum().backward()
        rows += logprobs_BT
    for row, sample in zip(rows, samples(), strict=True):
        expected = alone(plain, sample)
        expected.sum().backward()
        torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=0)
        assert not row[len(expected) :].any()
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            # Rounding is as large as the largest values make it, and differs between processors: 1.3e-5 was seen.
            atol = 5e-5 * theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, atol=atol, rtol=0, msg=lambda text, n=name: n + text)


def in_groups():
    """Two groups with a sequence between them; each completion is longer than the families' windows, or shorter."""
    random, made = torch.Generator().manual_seed(2), []
    for prompt_tokens, completions in ((11, (13, 1, 4)), (3, (5,)), (2, (9, 12))):
        ids = torch.randint(3, SIZES["vocab_size"], (prompt_tokens + sum(completions),), generator=random).tolist()
        made += [make_sample(ids[:prompt_tokens], ids[-length:]) for length in completions]
    return made, [0, 11, 11, 0, 0, 2]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_a_sequence_does_not_see_its_neighbour(family):
    model, (first, second, third) = make_sharp_model(family, attention.VARLEN), samples()
    batches = [[first, second, one] for one in (third, make_sample([9], third.completion.token_ids[::-1]))]
    one, other = (LogprobHead(model).per_token(model, micro_batch(batch), 1.0).logprobs_BT for batch in batches)
    assert torch.equal(one[:2], other[:2])


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_completions_share_computes_the_same_as_one_for_each(family, checkpointing, monkeypatch):
    monkeypatch.setattr(attention_blocks, "ROWS", 16)
    model, found = make_sharp_model(family, attention.VARLEN).train(), []
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    head, (made, shared) = LogprobHead(model, trains_entropy=True), in_groups()
    for batch in (micro_batch(made), micro_batch(made, shared)):
        values = head.per_token(model, batch, 0.7, Truncation(0.7, top_k=9), Penalties(1.2, 0.3, 0.1))
        pull = torch.arange(values.logprobs_BT.numel()).view_as(values.logprobs_BT) % 7
        (values.logprobs_BT * pull + values.entropy_BT).sum().backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        found.append(((values.logprobs_BT, values.entropy_BT), gradients, batch.num_tokens))
        model.zero_grad()
    (apart, gradients, all_tokens), (together, its_gradients, tokens) = found
    assert all_tokens - tokens == sum(shared)
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-5)
    assert gradients.keys() == its_gradients.keys()
    for name, gradient in gradients.items():
        atol = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(
            its_gradients[name], gradient, atol=atol, rtol=1e-4, msg=lambda text, n=name: n + text
        )


IN_FLOAT32 = [
    (family, implementation, torch.float32)
    for family in ("llama", "mistral", "qwen3_moe", "deepseek_v3")
    for implementation in (attention.VARLEN, "eager")
]


@pytest.mark.parametrize(("family", "implementation", "dtype"), [*((*one, torch.bfloat16) for one in OWN), *IN_FLOAT32])
def test_the_trial_at_the_start_accepts_it(family, implementation, dtype):
    model = make_sharp_model(family, implementation).to(dtype)
    policy = stand_in_policy(model, shares_prompts=family in FAMILIES and implementation == attention.VARLEN)
    sequences = {"perDeviceTrainBatchSize": None if family in FAMILIES else 1}
    try_policy(policy, config_of(training=sequences, model={"name": "m", "attention": implementation}))
