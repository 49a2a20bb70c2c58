"""Replayed routers choose the experts that they are told, in each family, packed or not, and in recomputation, too."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model import attention
from grpo_workload.policy.model.router_replay import RouterReplay, check_routed, find_routers
from grpo_workload.policy.step.reference import Reference
from grpo_workload.policy.trials.trial import try_policy
from support.families import FAMILIES, SIZES, make_model
from support.trainer.places import config_of
from support.trainer.samples import random_samples
from support.trainer.stand_in_policy import stand_in_policy

attention.register()
EXPERTS = 4
REFUSED = ("phimoe", "afmoe")
PACKED = [name for name, fields in FAMILIES.items() if "num_experts_per_tok" in fields and name not in REFUSED]


def make_samples(*lengths):
    """Samples of these lengths of prompt and completion, with random experts for each token and layer."""
    random, made = np.random.default_rng(0), []
    for sample, tokens in zip(random_samples(*lengths), map(sum, lengths), strict=True):
        order = random.random((tokens - 1, SIZES["num_hidden_layers"], EXPERTS)).argsort(axis=2)
        made.append(with_experts(sample, order[:, :, :2].astype(np.uint8)))
    return made


def make_head(family):
    model = make_model(family)
    model.set_attn_implementation(attention.VARLEN)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():  # each expert gives something else
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    return model, LogprobHead(model, replay=RouterReplay(model))


def with_experts(sample, experts):
    return replace(sample, completion=replace(sample.completion, routed_experts=experts))


@pytest.mark.parametrize("family", PACKED)
def test_a_token_goes_through_its_experts_alone_also_when_recomputed(family):
    model, head = make_head(family)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    told = np.broadcast_to(np.array([2, 0], np.uint8), (11, SIZES["num_hidden_layers"], 2))
    samples = [with_experts(sample, told) for sample in make_samples((3, 9), (7, 5))]
    head.per_token(model, micro_batch(samples), 1.0).logprobs_BT.sum().backward()
    stacked = [one for one in model.modules() if isinstance(getattr(one, "experts", None), nn.Module)]
    assert stacked
    for block in stacked:
        for name, parameter in block.experts.named_parameters():
            trained = parameter.grad.flatten(1).abs().sum(dim=1) > 0
            assert trained.tolist() == [True, False, True, False], name
    for router in find_routers(model).values():
        assert router.weight.grad.abs().sum() > 0  # the choice is told, the router still learns


@pytest.mark.parametrize("family", PACKED)
def test_packed_sequences_have_the_values_of_each_alone(family):
    model, head = make_head(family)
    samples = make_samples((3, 9), (5, 1), (1, 6))
    samples[1] = with_experts(samples[1], None)  # its routers choose
    packed = head.per_token(model, micro_batch(samples), 1.0).logprobs_BT
    halves = [head.per_token(model, half, 1.0).logprobs_BT for half in micro_batch(samples).halves()]
    torch.testing.assert_close(torch.cat(halves), packed)
    for row, sample in zip(packed, samples, strict=True):
        alone = head.per_token(model, micro_batch([sample]), 1.0).logprobs_BT[0]
        torch.testing.assert_close(row[: len(alone)], alone)
    own = head.per_token(model, micro_batch([with_experts(sample, None) for sample in samples]), 1.0).logprobs_BT
    differences_B = (packed - own).abs().amax(dim=1)
    assert differences_B[0] > 0.1
    assert differences_B[1] < 1e-5


def written_out(family, logits_NE, chosen_NX):
    """The weights of chosen experts, by the family's formula."""
    if family == "granitemoe":
        return logits_NE.gather(1, chosen_NX).softmax(dim=1)
    if family == "deepseek_v3":
        scores_NX = logits_NE.sigmoid().gather(1, chosen_NX)
        return 2.5 * scores_NX / scores_NX.sum(dim=1, keepdim=True)
    scores_NX = logits_NE.softmax(dim=1).gather(1, chosen_NX)
    return scores_NX if family == "qwen3_moe" else scores_NX / scores_NX.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe", "deepseek_v3"])
def test_weights_of_told_experts_are_those_of_the_routers_own_logits(family):
    model = make_model(family)
    order = -1 if family == "granitemoe" else 1  # it returns the experts first
    replay, (name, router) = RouterReplay(model), list(find_routers(model).items())[-1]
    experts_NLX = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(12)]).view(6, 2, 2).to(torch.int16)
    experts_NLX[4] = -1
    replay.use(experts_NLX)
    hidden_NH = torch.randn(6, SIZES["hidden_size"])
    logits_NE, weights_NX, indices_NX = router(hidden_NH)[::order]
    assert indices_NX[:4].tolist() == experts_NLX[:4, int(name.split(".")[2])].tolist()
    torch.testing.assert_close(weights_NX, written_out(family, logits_NE, indices_NX))
    replay.use(None)
    *_, own_NX = router(hidden_NH)[::order]
    assert indices_NX[4].tolist() == own_NX[4].tolist()


def test_the_reference_chooses_by_itself():
    model, head = make_head("qwen3_moe")
    (sample,) = make_samples((3, 9))
    own = Reference(model, head).logprobs(micro_batch([sample]), 1.0)
    torch.testing.assert_close(own, head.per_token(model, micro_batch([with_experts(sample, None)]), 1.0).logprobs_BT)


@pytest.mark.parametrize("family", PACKED)
def test_the_trial_at_the_start_accepts_it(family):
    model, head = make_head(family)
    try_policy(stand_in_policy(model, head), config_of())


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("llama", "LlamaForCausalLM is no mixture of experts"),
        ("llama4_text", "Llama4TextMoe has no router"),
        ("afmoe", "AfmoeSparseMoeBlock has no router"),
    ],
)
def test_models_whose_routers_cannot_be_replayed_are_refused(family, why):
    with pytest.raises(ConfigError, match=f"training.routerReplay: {why}"):
        find_routers(make_model(family))


def test_a_family_that_sorts_its_experts_otherwise_is_refused_at_the_start():
    model, head = make_head("phimoe")
    with pytest.raises(ConfigError, match=r"routerReplay: PhimoeTopKRouter does not choose its experts by torch.topk"):
        try_policy(stand_in_policy(model, head), config_of())


@pytest.mark.parametrize(
    ("routed", "why"),
    [
        (None, "returned the experts of 0 tokens of a sequence, not of 8"),
        (np.ones((7, 2, 2), np.uint8), "returned the experts of 7 tokens of a sequence, not of 8"),
        (np.zeros((8, 2, 2), np.uint8), "does not tell which ones it chose"),
    ],
)
def test_experts_that_vllm_does_not_tell_are_noticed(routed, why):
    (sample,) = make_samples((3, 6))
    check_routed(sample.prompt, sample.completion)
    with pytest.raises(ConfigError, match=why):
        check_routed(sample.prompt, with_experts(sample, routed).completion)
