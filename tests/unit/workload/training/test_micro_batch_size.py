"""Trials before training: the longest sequence, and sizes of micro-batches where these are measured.

On GPUs: tests/gpu/test_micro_batch_size.py.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_spec.words import counted
from grpo_workload.algorithm.samples import Prompt, PromptImages
from grpo_workload.algorithm.token_budget import MOST
from grpo_workload.data.scan import Longest
from grpo_workload.policy.trials.memory_trial import GIB, Choice, TooLongError, longest_sample
from grpo_workload.training import micro_batch_size
from grpo_workload.training.micro_batch_size import most_tokens, settle_micro_batches
from grpo_workload.training.trials import Found, Trials
from support.trainer.places import contract_json

CPU = SimpleNamespace(device=torch.device("cpu"))


def make_contract(training, *, halvings=0, gpus=2, **config):
    sections = {"training": training} | config
    return Contract.model_validate(contract_json(sections, gpus=gpus, device="cpu", microBatchHalvings=halvings))


def make_trials(found=None):
    return SimpleNamespace(tokens=Trials(Path("/nowhere"), "", found).tokens, keep=lambda found: None)


def call(contract, policy, folder, longest, *, generator=None, images=False, found=None):
    settled = settle_micro_batches(
        contract,
        policy,
        generator,
        rank=0,
        weight_version=0,
        longest=longest,
        has_images=images,
        state_dir=folder,
        trials=make_trials(found),
    )
    return settled.config.training.max_tokens_per_micro_batch


@pytest.mark.parametrize(
    ("training", "halvings", "tokens"), [({}, 0, 8192), ({}, 2, 2048), ({"maxTokensPerMicroBatch": 3000}, 1, 3000)]
)
def test_without_a_gpu_nothing_is_measured_and_a_set_size_is_kept(training, halvings, tokens, tmp_path, caplog):
    caplog.set_level("INFO")
    contract = make_contract(training, halvings=halvings)
    assert call(contract, CPU, tmp_path, Longest(None, True)) == tokens
    assert list(tmp_path.iterdir()) == [], "it enters no phase"
    why = ": training.maxTokensPerMicroBatch" if training else ", the default without a GPU"
    assert f"micro-batches of {tokens} tokens{why}" in caplog.text
    assert (f"halved {counted(halvings, 'time')} after running out of memory" in caplog.text) == (halvings > 0)


def settle(monkeypatch, tmp_path, choice, *, prompt=None, known=True, training=None, found=None, **config):
    """Settle on a GPU whose trial has `choice` as its end; return the contract, and what was tried."""
    tried = []

    def try_memory(policy, memory, longest, **sizes):
        tried.append(
            {"prompt": len(longest.prompt.token_ids), "completion": len(longest.completion.token_ids), **sizes}
        )
        if isinstance(choice, Exception):
            raise choice
        return choice._replace(tokens=sizes["fixed"] or choice.tokens)

    monkeypatch.setattr(micro_batch_size, "CudaMemory", lambda policy: None)
    monkeypatch.setattr(micro_batch_size, "gather", lambda value: [value, (1, True)])
    monkeypatch.setattr(micro_batch_size, "try_memory", try_memory)
    policy = SimpleNamespace(
        device=torch.device("cuda", 0), module=SimpleNamespace(config=LlamaConfig()), weights=lambda: iter(())
    )
    generator = SimpleNamespace(sleep=lambda: None, sync_weights=lambda weights, version: None)
    longest = Longest(prompt or Prompt(index=0, text="", token_ids=(7,) * 100), known)
    contract, images = make_contract(training or {}, **config), longest.prompt.images is not None
    tokens = call(contract, policy, tmp_path, longest, generator=generator, images=images, found=found)
    return tokens, tried[0] if tried else None


@pytest.mark.parametrize(("prompt_tokens", "is_tried"), [(99, True), (100, False), (200, False)])
def test_what_an_earlier_attempt_found_with_prompts_as_long_is_not_tried_again(
    monkeypatch, tmp_path, prompt_tokens, is_tried
):
    tokens, tried = settle(monkeypatch, tmp_path, ROOM, found=Found(tokens=5000, prompt_tokens=prompt_tokens))
    assert (tokens, tried is not None) == (MOST if is_tried else 5000, is_tried)


ROOM = Choice(tokens=MOST, rooms=[60 * GIB, 60 * GIB], longest=GIB)
IMAGES = PromptImages(images=(), engine_ids=(), token_id=9, inputs={})


@pytest.mark.parametrize(
    ("training", "config", "images", "why"),
    [
        ({"perDeviceTrainBatchSize": 1}, {}, None, "one sequence, however long"),
        ({}, {"model": {"name": "org/model", "attention": "sdpa"}}, None, "model.attention sdpa"),
        ({}, {"model": {"name": "org/model", "attention": "eager"}}, None, "model.attention eager"),
        ({}, {}, IMAGES, "with images"),
        ({"maxTokensPerMicroBatch": 8192}, {}, None, "training.maxTokensPerMicroBatch"),
    ],
)
def test_the_longest_sequence_is_tried_also_where_the_size_is_not_measured(
    training, config, images, why, monkeypatch, tmp_path, caplog
):
    caplog.set_level("INFO")
    prompt = Prompt(index=0, text="", token_ids=(9,) * 100, images=images)
    training = {"maxCompletionLength": 3000, **training}
    tokens, tried = settle(monkeypatch, tmp_path, ROOM, prompt=prompt, training=training, **config)
    assert tokens == 8192
    assert why in caplog.text
    most = 3100 if "perDeviceTrainBatchSize" in training else 8192
    assert tried == {"prompt": 100, "completion": 3000, "fixed": 8192, "most": most, "halvings": 0}


@pytest.mark.parametrize("known", [True, False])
def test_a_prompt_is_as_long_as_those_that_were_read(known, monkeypatch, tmp_path, caplog):
    """generation.maxModelLen may allow far more, and no job ends for a prompt that may not exist."""
    caplog.set_level("INFO")
    generation, training = {"maxModelLen": 5000}, {"maxCompletionLength": 3000}
    _, tried = settle(monkeypatch, tmp_path, ROOM, known=known, training=training, generation=generation)
    assert (tried["prompt"], tried["completion"], tried["fixed"]) == (100, 3000, None)
    assert ("memory for longer ones is not tried" in caplog.text) == (not known)


def test_images_stand_at_the_beginning_of_the_longest_prompt_and_nowhere_else(monkeypatch):
    policy = SimpleNamespace(module=SimpleNamespace(config=LlamaConfig(vocab_size=12)))
    prompt = Prompt(index=3, text="", token_ids=(1, 9, 9, 2), images=IMAGES)
    sample = longest_sample(policy, 200, 50, prompt)
    assert sample.prompt.token_ids[:4] == (1, 9, 9, 2)
    assert (len(sample.prompt.token_ids), len(sample.completion.token_ids)) == (150, 50)
    assert 9 not in sample.prompt.token_ids[4:] + sample.completion.token_ids
    assert sample.prompt.images is IMAGES


@pytest.mark.parametrize(
    ("training", "most"),
    [
        ({"promptsPerStep": 64}, MOST),
        ({"promptsPerStep": 3, "numGenerations": 3}, 5 * 1000),
        ({"perDeviceTrainBatchSize": 4}, 4 * 1000),
    ],
)
def test_a_size_is_measured_up_to_what_a_rank_trains_on_in_a_step(training, most):
    assert most_tokens(make_contract(training), 1000) == most


@pytest.mark.parametrize(
    ("choice", "length", "said"),
    [
        (ROOM, 100_000, None),  # a long sequence has a micro-batch of its own, on an empty GPU, too
        (Choice(tokens=4000, rooms=[2 * GIB, 2 * GIB], longest=GIB), 3000, None),
        (Choice(tokens=4000, rooms=[2 * GIB, 2 * GIB], longest=GIB), 30_000, "micro-batch of its own, which is slow"),
        (Choice(tokens=1, rooms=[-GIB, -GIB], longest=GIB), 3000, "takes 1.0 GiB, which leaves less than a tenth"),
        (Choice(tokens=4000, rooms=[60 * GIB, 2 * GIB], longest=GIB), 3000, "rank 1 has 2.0 GiB free"),
    ],
)
def test_short_memory_is_named_and_ample_memory_is_not(choice, length, said, monkeypatch, tmp_path, caplog):
    settle(monkeypatch, tmp_path, choice, training={"maxCompletionLength": length - 100})
    assert [said in record.message for record in caplog.records if record.levelname == "WARNING"] == [True] * bool(said)


def test_a_longest_sequence_that_does_not_fit_is_refused_with_bytes_and_cures(monkeypatch, tmp_path):
    error = TooLongError(61 * GIB, 92 * GIB, "Tried to allocate 20 GiB")
    with pytest.raises(ConfigError) as refused:
        settle(monkeypatch, tmp_path, error, training={"maxCompletionLength": 32_768})
    said = str(refused.value)
    begin = "training.maxCompletionLength: the longest sequence that the job allows, a prompt of 100 tok"
    assert said.startswith(begin)
    memory = "a completion of 32768", "takes about 92.0 GiB beside", "61.0 GiB are free"
    cures = "parallelism.gradientCheckpointing", "zeroStage 3", "offloadOptimizer", "lora"
    assert [part for part in (*memory, *cures) if part not in said] == []
    assert "varlen" not in said
    assert "maxModelLen" not in said, "the prompt is not what is long"
    assert said.endswith(": Tried to allocate 20 GiB")


def test_cures_that_a_job_has_already_are_not_advised(monkeypatch, tmp_path):
    with pytest.raises(ConfigError) as refused:
        settle(
            monkeypatch,
            tmp_path,
            TooLongError(61 * GIB, 50 * GIB, "Tried to allocate 20 GiB"),
            training={"maxCompletionLength": 50},
            model={"name": "org/model", "attention": "eager"},
            parallelism={"zeroStage": 3, "gradientCheckpointing": True, "offloadOptimizer": "generating"},
            lora={"r": 8},
        )
    said = str(refused.value)
    assert "takes more than 50.0 GiB" in said, "its line does not tell: memory was in pieces, or grows with the square"
    cures = "model.attention varlen", "lower generation.maxModelLen", "parallelism.offloadActivations"
    assert [cure for cure in cures if cure not in said] == []
    for had in ("gradientCheckpointing", "zeroStage", "offloadOptimizer", "lora"):
        assert had not in said
