"""Asserts which models a trial of a few tokens refuses, with which words, and that it leaves nothing behind.

Which ones it accepts: test_families.py. Under DeepSpeed, with every ZeRO stage: tests/trainer/policy/test_step.py.
"""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    RecurrentGemmaConfig,
    SeedOssConfig,
)

from grpo_spec.errors import ConfigError
from grpo_spec.lora import LoraConfig
from grpo_workload.policy.adapters.lora import Adapters, output_layers
from grpo_workload.policy.logprobs.head import LogprobHead
from grpo_workload.policy.model import attention, attention_kernels
from grpo_workload.policy.model.load import remove_noise
from grpo_workload.policy.model.logit_change import LogitChange
from grpo_workload.policy.trials.engine_room import agree
from grpo_workload.policy.trials.trial import try_policy
from grpo_workload.ranks.sequence_group import SequenceGroup
from support.families import LONG_ROPE, SHORT
from support.families import make_config as make_family_config
from support.trainer.places import config_of
from support.trainer.stand_in_policy import stand_in_policy

attention.register()
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA = LlamaConfig(**SHAPE)


def make_policy(config, implementation="varlen", *, lora=None, dtype=torch.float32):
    """The parts of a policy that the trial uses, without DeepSpeed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    layers = None
    if lora is not None:
        Adapters(model, lora, seed=0)
        layers = output_layers(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return stand_in_policy(model, LogprobHead(model, layers), shares_prompts=implementation == "varlen")


def make_config(implementation="varlen", *, sequences=None, max_model_len=None):
    return config_of(
        model={"name": "org/model", "attention": implementation},
        training={"perDeviceTrainBatchSize": sequences, "maxCompletionLength": 16},
        generation={"maxModelLen": max_model_len},
    )


def try_model(config, implementation="varlen", *, sequences=None, **settings):
    try_policy(make_policy(config, implementation, **settings), make_config(implementation, sequences=sequences))


def test_attention_that_does_not_look_at_a_shared_prompt_is_refused():
    def apart(*args, shared_keys=None, **others):
        return attention.attend(*args, **others)

    attention.AttentionInterface.register("varlen", apart)
    try:
        with pytest.raises(ConfigError, match=r"to a prompt that completions share: .*BatchSize 1 would work"):
            try_model(LLAMA)
        try_model(LLAMA, sequences=1)
    finally:
        attention.register()


@pytest.mark.parametrize("lora", [None, LoraConfig(dropout=0.1)])
def test_it_leaves_weights_gradients_random_numbers_and_modes_alone(lora):
    policy = make_policy(LLAMA, lora=lora)
    hooks = dict(policy.module.get_input_embeddings()._forward_hooks)
    before = {name: weight.clone() for name, weight in policy.module.state_dict().items()}
    policy.module.eval()
    state = torch.get_rng_state()
    try_policy(policy, make_config())
    assert torch.equal(state, torch.get_rng_state())
    assert not policy.module.training
    assert all(parameter.grad is None for parameter in policy.module.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in policy.module.state_dict().items())
    assert policy.module.get_input_embeddings()._forward_hooks == hooks


@pytest.mark.parametrize(
    ("config", "implementation", "message"),
    [
        (
            GptOssConfig(**SHAPE, **EXPERTS),
            "eager",
            "mixes sequences .*; training.perDeviceTrainBatchSize 1 would work",
        ),
        (SeedOssConfig(**SHAPE), "varlen", "varlen does not support attention dropout, .* config.json sets it to 0"),
        (SeedOssConfig(**SHAPE), "eager", "computes something else in training than engines sample with"),
        (MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2), "varlen", "mixes sequences that are packed"),
    ],
    ids=["gpt_oss without a mask", "seed_oss", "seed_oss with noise", "mamba"],
)
def test_models_that_do_not_are_refused_by_the_field_and_the_cause(config, implementation, message):
    with pytest.raises(ConfigError, match=f"model.name: org/model .*{message}"):
        try_model(config, implementation)


def test_what_it_advises_works():
    try_model(GptOssConfig(**SHAPE, **EXPERTS), "eager", sequences=1)
    try_model(SeedOssConfig(**SHAPE, attention_dropout=0.0, residual_dropout=0.0), "varlen")


def test_an_attention_that_ignores_the_bounds_is_caught(monkeypatch):
    """As a model with an attention function of its own would, which this list of layer types does not show."""
    monkeypatch.setattr(attention_kernels, "pairwise", lambda bounds: [(bounds[0], bounds[-1])])
    with pytest.raises(ConfigError, match="varlen mixes sequences"):
        try_model(LLAMA)


@pytest.mark.parametrize("sequences", [None, 1])
@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_a_model_whose_tokens_depend_on_the_longest_sequence_is_refused(family, sequences):
    """Loading gives `phi3` frequencies that do not; `phimoe` scales by itself, and a list of RoPE's types misses it."""
    fields = copy.deepcopy(LONG_ROPE)
    fields["rope_parameters"] |= {"short_mscale": 1.0, "long_mscale": 1.5}
    policy = make_policy(make_family_config(family, **fields))
    remove_noise(policy.module)
    with pytest.raises(ConfigError, match="computes a token otherwise where a longer sequence is in its micro-batch"):
        try_policy(policy, make_config(sequences=sequences))
    try_policy(policy, make_config(sequences=sequences, max_model_len=SHORT))


def test_a_change_of_logits_that_training_does_not_make_is_refused(monkeypatch):
    monkeypatch.setattr(LogitChange, "of", lambda model: LogitChange())
    with pytest.raises(
        ConfigError, match=r"model.name: org/model changes the logits of its output layer in a way that"
    ):
        try_model(Cohere2Config(**SHAPE, logit_scale=0.25))


def test_a_change_of_logits_that_rounding_could_hide_is_refused():
    """In bfloat16, log-probabilities may differ by more than the soft cap of RecurrentGemma changes them."""
    policy = make_policy(RecurrentGemmaConfig(**SHAPE, lru_width=32, logits_soft_cap=1.0), dtype=torch.bfloat16)
    with torch.no_grad():
        policy.module.lm_head.weight *= 10
    with pytest.raises(ConfigError, match=r"changes the logits .* differ by [\d.]+ nats, logits by \d+.\d%"):
        try_policy(policy, make_config(sequences=1))


def test_training_that_computes_something_else_the_second_time_is_refused():
    policy, trained = make_policy(LLAMA), []

    def double_the_second(module, _inputs, hidden):
        trained.append(module.training)
        return hidden * 2 if module.training and sum(trained) == 2 else hidden

    policy.module.model.norm.register_forward_hook(double_the_second)
    with pytest.raises(ConfigError, match="computes something else in training than engines sample with"):
        try_policy(policy, make_config())


def test_an_attention_that_leaves_something_out_is_refused():
    policy = make_policy(Gemma2Config(**SHAPE, attn_logit_softcapping=0.1), "sdpa")
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter *= 10
    with pytest.raises(ConfigError, match=r"model.attention: sdpa does not compute the attention of .*; use eager"):
        try_policy(policy, make_config("sdpa"))
    policy.module.set_attn_implementation("varlen")
    try_policy(policy, make_config("varlen"))


def test_log_probabilities_that_are_not_finite_are_refused():
    policy = make_policy(LLAMA)
    with torch.no_grad():
        policy.module.model.norm.weight.fill_(float("inf"))
    with pytest.raises(ConfigError, match="computes log-probabilities that are not finite"):
        try_policy(policy, make_config())


def test_a_device_that_runs_out_of_memory_is_no_mistake_of_the_user():
    policy = make_policy(LLAMA)

    def full(*_):
        raise torch.OutOfMemoryError("full")

    policy.module.model.layers[1].register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        try_policy(policy, make_config())


@pytest.mark.parametrize("alone", [{"is_partitioned": True}, {"group": SequenceGroup(None, 0, 2)}], ids=str)
def test_a_rank_that_another_has_left_alone_does_not_blame_the_model(alone):
    policy = make_policy(LLAMA)
    vars(policy).update(alone)

    def lost(*_):
        raise RuntimeError("Connection closed by peer")

    policy.module.model.layers[1].register_forward_pre_hook(lost)
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
        try_policy(policy, make_config())


def test_ranks_agree_on_the_least_room():
    assert agree([30, 20, 25]) == 20
    with pytest.raises(ConfigError, match=r"leaves no memory for vLLM \(1.5 GiB are lacking .*offloadOptimizer"):
        agree([2**30, -3 * 2**29])
