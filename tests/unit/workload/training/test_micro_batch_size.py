"""Which jobs get which size of micro-batches without a measurement, and on what sizes the others measure.

On GPUs: tests/gpu/test_micro_batch_size.py.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, MambaConfig

from grpo_spec.contract import Contract
from grpo_workload.algorithm.token_budget import MOST
from grpo_workload.policy.trials.memory_trial import Choice
from grpo_workload.training import micro_batch_size
from grpo_workload.training.micro_batch_size import most_tokens, sequence_tokens, settle_micro_batches

CPU = SimpleNamespace(device=torch.device("cpu"))


def make_contract(training, *, halvings=0, gpus=2, **config):
    return Contract.model_validate(
        {
            "job": {"namespace": "ns", "name": "job", "uid": "uid"},
            "attempt": 0,
            "device": "cpu",
            "members": [{"pod": "job-0", "group": "a", "host": "127.0.0.1", "gpus": gpus, "rankOffset": 0}],
            "durable": True,
            "microBatchHalvings": halvings,
            "config": {
                "model": {"name": "org/model"},
                "dataset": {"name": "d"},
                "rewards": [{"name": "r", "accuracy": {}}],
                "training": training,
                **config,
            },
        }
    )


@pytest.mark.parametrize(
    ("training", "halvings", "tokens"),
    [({}, 0, 8192), ({}, 2, 2048), ({"maxTokensPerMicroBatch": 3000}, 1, 3000)],
)
def test_without_a_gpu_nothing_is_measured_and_a_set_size_is_kept(training, halvings, tokens, tmp_path, caplog):
    caplog.set_level("INFO")
    contract = settle_micro_batches(
        make_contract(training, halvings=halvings),
        CPU,
        None,
        rank=0,
        weight_version=0,
        has_images=False,
        state_dir=tmp_path,
    )
    assert contract.config.training.max_tokens_per_micro_batch == tokens
    assert list(Path(tmp_path).iterdir()) == [], "it enters no phase"
    why = ": training.maxTokensPerMicroBatch" if training else ", the default without a GPU"
    assert f"micro-batches of {tokens} tokens{why}" in caplog.text
    assert (f"halved {halvings} times after running out of memory" in caplog.text) == (halvings > 0)


@pytest.mark.parametrize(
    ("training", "config", "why"),
    [
        ({"perDeviceTrainBatchSize": 1}, {}, "one sequence, however long"),
        ({}, {"model": {"name": "org/model", "attention": "sdpa"}}, "model.attention sdpa"),
        ({}, {"model": {"name": "org/model", "attention": "eager"}}, "model.attention eager"),
        ({}, {}, "with images"),
    ],
)
def test_on_a_gpu_nothing_is_measured_where_it_would_not_tell(training, config, why, tmp_path, caplog):
    caplog.set_level("INFO")
    settled = settle_micro_batches(
        make_contract(training, **config),
        SimpleNamespace(device=torch.device("cuda", 0)),
        None,
        rank=0,
        weight_version=0,
        has_images=True,
        state_dir=tmp_path,
    )
    assert settled.config.training.max_tokens_per_micro_batch == 8192
    assert why in caplog.text


@pytest.mark.parametrize(
    ("training", "context", "most", "length"),
    [
        ({"promptsPerStep": 64}, {}, MOST, 257),
        ({"promptsPerStep": 3, "numGenerations": 3}, {"maxModelLen": 1000}, 5000, 257),
        ({"promptsPerStep": 3, "numGenerations": 3}, {}, 5 * 2048, 257),
        ({"maxCompletionLength": 400}, {"maxModelLen": 500}, 16_000, 401),
        ({"perDeviceTrainBatchSize": 4}, {"maxModelLen": 1000}, 4000, 1000),
    ],
)
def test_a_size_is_measured_up_to_what_a_rank_trains_on_in_a_step(training, context, most, length):
    contract = make_contract(training, generation=context)
    model = LlamaConfig(max_position_embeddings=2048)
    assert most_tokens(contract, model) == most
    assert sequence_tokens(contract.config, most) == length


def test_a_model_without_a_longest_context_is_measured_up_to_the_largest_size():
    assert most_tokens(make_contract({}), MambaConfig()) == MOST


def test_memory_in_which_hardly_a_sequence_fits_is_named(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(micro_batch_size, "CudaMemory", lambda policy: None)
    monkeypatch.setattr(micro_batch_size, "choose_tokens", lambda policy, memory, **_: Choice(tokens=1, room=-(2**28)))
    policy = SimpleNamespace(
        device=torch.device("cuda", 0), module=SimpleNamespace(config=LlamaConfig()), weights=lambda: iter(())
    )
    generator = SimpleNamespace(sleep=lambda: None, sync_weights=lambda weights, version: None)
    settled = settle_micro_batches(
        make_contract({}), policy, generator, rank=0, weight_version=0, has_images=False, state_dir=tmp_path
    )
    assert settled.config.training.max_tokens_per_micro_batch == 1
    assert "each sequence is a micro-batch of its own" in caplog.text
    assert "-0.2 GiB are free" in caplog.text
