"""A token's log-probability does not depend on the length of its neighbours, and lengths unlike vLLM's are refused.

That factors and scaling are vLLM's own is tested with it: tests/trainer/generation/test_colocate.py.
"""

import copy
from contextlib import nullcontext

import pytest
import torch

from grpo_spec.errors import ConfigError
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model import attention
from grpo_workload.policy.model.load import load_model
from grpo_workload.policy.model.rope import LONG, check_rope
from grpo_workload.policy.trials.trial import try_policy
from support.families import LONG_ROPE, SHORT, SIZES, make_config, make_model
from support.trainer.places import config_of
from support.trainer.samples import random_samples
from support.trainer.stand_in_policy import stand_in_policy

attention.register()
CONTEXT = SIZES["max_position_embeddings"]
LENGTHS = (20, SHORT, SHORT + 1, 100)
NOT_FLAT = {"full_attention": LONG_ROPE["rope_parameters"], "sliding_attention": {"rope_type": "default"}}
PLAIN = {"topology": "Colocate", "engine": "Transformers"}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}


def config_with(**generation):
    return config_of(model={"name": "org/model"}, training={"maxCompletionLength": 16}, generation=generation)


def load(folder, family, max_model_len, **fields):
    """As a job loads it, with weights large enough that factors show."""
    model = make_model(family, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    config = config_with(maxModelLen=max_model_len)
    model_fields = config.model.model_copy(update={"name": None, "path": str(folder), "dtype": "float32"})
    return load_model(config.model_copy(update={"model": model_fields}), torch.device("cpu"))


def passes(model, batches):
    """Log-probabilities of each sequence, and the gradients of their sum."""
    model.zero_grad()
    head = LogprobHead(model)
    rows = [row for batch in batches for row in head.per_token(model, micro_batch(batch), 1.0).logprobs_BT]
    torch.cat(rows).sum().backward()
    return [row.detach() for row in rows], [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("family", [*LONG, "dynamic"])
def test_neighbours_do_not_change_a_sequence(family, tmp_path):
    fields = DYNAMIC if family == "dynamic" else LONG_ROPE
    samples = random_samples(*((1, length - 1) for length in LENGTHS))
    model = load(tmp_path, "llama" if family == "dynamic" else family, CONTEXT, **fields)
    packed, packed_gradients = passes(model, [samples])
    alone, gradients = passes(model, [[one] for one in samples])
    for length, row, expected in zip(LENGTHS, packed, alone, strict=True):
        torch.testing.assert_close(row[: length - 1], expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5 * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("max_model_len", "kind"), [(SHORT, "short"), (SHORT + 1, "long")])
def test_all_sequences_have_the_factors_of_the_longest_that_the_job_allows(max_model_len, kind, tmp_path):
    """Also the scaling is vLLM's, which has its own names for it, and for which transformers' `factor` is none."""
    fields = LONG_ROPE["rope_parameters"] | {"short_mscale": 1.1, "long_mscale": 1.7, "factor": 2.0}
    model = load(tmp_path, "phi3", max_model_len, **LONG_ROPE | {"rope_parameters": fields})
    expected = 1e4 ** -(torch.arange(16) / 16) / torch.tensor(fields[f"{kind}_factor"])
    places = torch.tensor([[0, 1, 20, 200]])
    cos, _ = model.model.rotary_emb(torch.zeros(1), places)
    torch.testing.assert_close(cos[0, :, :16], (places[0].unsqueeze(1) * expected).cos() * fields[f"{kind}_mscale"])
    policy = stand_in_policy(model, shares_prompts=True)
    try_policy(policy, config_with(maxModelLen=max_model_len))
    assert model.config.rope_parameters == fields, "the checkpoints of the job say what its model said"


@pytest.mark.parametrize(
    ("family", "fields", "generation", "message"),
    [
        ("phi3", LONG_ROPE, {}, "generation.maxModelLen: it must be set for org/model, .* of up to 48 tokens"),
        ("glm", LONG_ROPE, {"maxModelLen": SHORT + 1}, "the longrope of glm beyond 48 .*; up to 48 would work"),
        ("olmo3", {"rope_parameters": NOT_FLAT}, {"maxModelLen": SHORT + 1}, "the longrope of olmo3 beyond 48"),
        ("phi3", LONG_ROPE, {"maxModelLen": SHORT, "engineArgs": {"model-impl": "auto"}}, "engineArgs: model_impl"),
        ("llama", DYNAMIC, {"maxModelLen": CONTEXT + 1}, "maxModelLen: 257 .* 256 positions .*; up to 256 would work"),
        (
            "llama",
            {},
            PLAIN | {"maxModelLen": CONTEXT + 1},
            "maxModelLen: 257 .* 256 positions .*; up to 256 would work",
        ),
        # What those refusals advise:
        ("llama", {}, PLAIN | {"maxModelLen": CONTEXT}, None),
        ("llama", {}, {"maxModelLen": CONTEXT + 1}, None),  # vLLM says it
        ("glm", LONG_ROPE, {"maxModelLen": SHORT}, None),
        ("glm", LONG_ROPE | {"max_position_embeddings": SHORT}, {}, None),
        ("phi3", LONG_ROPE, {"maxModelLen": CONTEXT, "engineArgs": {"enforce_eager": True}}, None),
        ("llama", DYNAMIC, {}, None),
        ("llama", DYNAMIC, {"maxModelLen": CONTEXT}, None),
    ],
)
def test_what_is_not_known_to_be_as_in_vllm_is_refused(family, fields, generation, message):
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_rope(make_config(family, **copy.deepcopy(fields)), config_with(**generation))
