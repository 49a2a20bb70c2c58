"""A group's prompt that is fed once changes nothing of a step: losses, the KL term and adapters, old log-probabilities.

Family by family, with truncation, penalties and entropies: test_families.py. Under ZeRO, over ranks:
tests/trainer/policy/test_step.py.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from grpo_spec.lora import LoraConfig
from grpo_spec.training import TrainingConfig
from grpo_workload.algorithm.loss import LossScale
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.policy.adapters.lora import Adapters
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.loss.batch_loss import batch_loss
from grpo_workload.policy.memory.activation_offload import Activations
from grpo_workload.policy.model import attention
from grpo_workload.policy.model.attention_kernels import copied
from grpo_workload.policy.model.sharing import why_apart
from grpo_workload.policy.step.reference import Reference
from support.families import make_model
from support.trainer.places import config_of
from support.trainer.samples import make_sample

attention.register()
GROUPS = (((5, 6, 7, 8, 9, 10), (4, 7, 1)), ((3,), (5,)), ((20, 21, 22), (2, 6)))
SCALE = LossScale(num_sequences=6, num_tokens=25)
OFFLOADED = {"gradientCheckpointing": True, "offloadActivations": True}


def make_samples():
    random, samples, shared = torch.Generator().manual_seed(0), [], []
    for prompt_ids, lengths in GROUPS:
        for number, length in enumerate(lengths):
            ids = torch.randint(3, 128, (length,), generator=random).tolist()
            advantage = (-1.0) ** number * length
            samples.append(make_sample(prompt_ids, ids, logprobs=(-4.8,) * length, advantage=advantage))
            shared.append(len(prompt_ids) if number else 0)
    return samples, shared


def make_policy():
    model = make_model("qwen3")
    model.set_attn_implementation(attention.VARLEN)
    attention.keep_bounds(model)
    adapters = Adapters(model, LoraConfig.model_validate({"r": 4, "alpha": 16}), seed=1)
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    return model, LogprobHead(model), adapters


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(("loss_type", "level"), [("dapo", "token"), ("grpo", "sequence")])
def test_losses_and_gradients_of_adapters_with_a_kl_term(loss_type, level, offloads):
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    training = TrainingConfig(beta=0.3, temperature=0.7, importance_sampling_correction="none", **options)
    samples, shared = make_samples()
    found = []
    for batch in (micro_batch(samples), micro_batch(samples, shared)):
        model, head, adapters = make_policy()
        reference = Reference(model, head, adapters)
        with torch.no_grad():
            old_BT = head.per_token(model, batch, 0.7).logprobs_BT + 0.05 * batch.mask_BC
        batch = replace(batch, old_logprobs_BC=old_BT)
        model.train()
        ref_BT = reference.logprobs(batch, 0.7)
        with Activations(torch.device("cpu")).offloaded() if offloads else nullcontext():
            values = head.per_token(model, batch, 0.7)
        output, _ = batch_loss(values, batch, training, scale=SCALE, ref_logprobs_BT=ref_BT)
        output.loss.backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        assert all("lora" in name for name in gradients)
        found.append((output, ref_BT, old_BT, gradients))
    (apart, *others, gradients), (together, *its_others, its_gradients) = found
    torch.testing.assert_close(its_others, others, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.loss, apart.loss, atol=1e-5, rtol=1e-5)
    assert apart.metrics["kl"] > 1e-3
    torch.testing.assert_close(together.metrics, apart.metrics, atol=1e-4, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(its_gradients[name], gradient, atol=1e-5, rtol=1e-5)


def test_gradients_of_copies_are_summed_in_float32():
    rows = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    copies = copied(rows, torch.tensor([1] * 512 + [2]))
    (copies * torch.full((513, 1), 1.0)).sum().backward()
    assert rows.grad.tolist() == [[0, 0], [512, 512], [1, 1]], "bfloat16 would have stopped counting at 256"


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3", {}, None),
        ("gpt_oss", {}, None),
        ("qwen3", {"model": {"name": "m", "attention": "sdpa"}}, "model.attention sdpa"),
        ("qwen3_moe", {"training": {"routerReplay": True}}, "training.routerReplay"),
        ("deepseek_v3", {}, "latent attention"),
        ("llama", {"parallelism": OFFLOADED}, "wide keys"),
        ("gpt2", {"parallelism": OFFLOADED}, "wide keys"),
        ("mistral", {"parallelism": OFFLOADED}, None),
        ("gemma4_text", {"parallelism": OFFLOADED}, "wide keys"),
        ("falcon_mamba", {"parallelism": OFFLOADED}, None),
        ("qwen3_vl", {}, "images"),
        ("unknown", {}, "none of the families"),
    ],
)
def test_what_keeps_prompts_apart_is_named(family, fields, reason):
    unknown = type("UnknownConfig", (LlamaConfig,), {"model_type": "unknown"})
    model_config = unknown() if family == "unknown" else AutoConfig.for_model(family)
    said = why_apart(config_of(**fields), model_config)
    assert said is None if reason is None else reason in str(said)
