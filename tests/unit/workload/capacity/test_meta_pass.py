"""Bytes of a pass on the meta device: those of the CPU's own allocator, and what must and must not change them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from grpo_spec.trainer import TrainerConfig
from grpo_workload.algorithm.micro_batch import micro_batch
from grpo_workload.algorithm.pieces import Piece, Unit
from grpo_workload.algorithm.samples import Prompt
from grpo_workload.capacity import meta_pass
from grpo_workload.capacity.meta_pass import Activations, activations, batch_of, training_model, training_pass
from grpo_workload.capacity.stand_ins import Live, like_a_gpu
from grpo_workload.policy.model import tiles
from grpo_workload.policy.model.attention_kernels import Bounds, varlen
from grpo_workload.policy.model.replacing import replaced
from grpo_workload.policy.trials.memory_trial import make_sample
from support.families import FAMILIES, SIZES, make_config

SMALL = SIZES | {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 8192}

JOB = {"dataset": {"name": "d"}, "rewards": [{"name": "r", "accuracy": {}}]}
OFFLOADED = {"gradientCheckpointing": True, "offloadActivations": True}


def make(folder: Path, family: str = "qwen3", model: dict[str, Any] | None = None, **sections: Any) -> TrainerConfig:
    AutoConfig.for_model(family, **SMALL | FAMILIES[family]).save_pretrained(folder)
    return TrainerConfig.model_validate({"model": {"path": str(folder)} | (model or {})} | JOB | sections)


def measured(config: TrainerConfig, tokens: int) -> int:
    """Bytes of a real pass by the CPU's allocator, above what there is before."""
    model = training_model(config).to_empty(device="cpu")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with (
        like_a_gpu(model, liger=False, live=Live()),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        training_pass(model, config, batch_of(tokens, tokens, "cpu"), nullcontext())
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    ("family", "checkpointing", "lora", "tile"),
    [
        ("qwen3", False, {}, tiles.TILE),
        ("qwen3", True, {}, tiles.TILE),
        ("qwen3", True, {}, 48),
        ("olmo2", True, {}, 48),
        ("llama", False, {"lora": {"r": 8}}, 48),
        ("qwen2", True, {"lora": {}}, tiles.TILE),
        ("qwen2", True, {"lora": {}}, 48),
    ],
)
def test_bytes_are_those_of_the_cpu_allocator(
    family: str, checkpointing: bool, lora: dict[str, Any], tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", tile)
    model = {"dtype": "float32", "attention": "eager", "useLigerKernel": False}
    config = make(tmp_path, family, model, parallelism={"zeroStage": 0, "gradientCheckpointing": checkpointing}, **lora)
    real, planned = measured(config, 200), activations(training_model(config), config, 200, 200, is_first=False)
    assert planned.others + planned.logits == pytest.approx(real, rel=0.005)


def on_gpu(found: Activations) -> int:
    return found.others + found.logits + found.gradients


@pytest.mark.parametrize("settings_", [{}, {"gradientCheckpointing": True}, OFFLOADED], ids=str)
@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 8}], ids=str)
def test_a_shared_prompt_takes_at_most_the_memory_of_single_sequences_of_the_size_that_counts(
    settings_: dict[str, Any], heads: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly as much with multi-head attention, whose keys are as large as hidden states."""
    shape = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2} | heads
    AutoConfig.for_model("llama", **SMALL | shape).save_pretrained(tmp_path)
    config = TrainerConfig.model_validate(JOB | {"model": {"path": str(tmp_path)}, "parallelism": settings_})
    model, prompt = training_model(config), Prompt(index=0, text="", token_ids=(1,) * 4096)
    samples = [make_sample(prompt, (1,) * 128) for _ in range(8)]
    pieces = [Piece(0, place, 4096 + 128, shared=4096 if place else 0) for place in range(8)]
    size = Unit(tuple(pieces)).size
    single = activations(model, config, size, 1024, is_first=False)
    batch = micro_batch(samples, [piece.shared for piece in pieces]).to("meta")
    monkeypatch.setattr(meta_pass, "batch_of", lambda *_: batch)
    shared = activations(model, config, size, 1024, is_first=False)
    assert on_gpu(shared) <= on_gpu(single)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "deepseek_v3", "mixtral"])
def test_families_run_on_the_meta_device_with_more_memory_for_more_tokens(family: str, tmp_path: Path) -> None:
    config = make(tmp_path, family)
    model = training_model(config)
    few, many = (on_gpu(activations(model, config, tokens, 256, is_first=True)) for tokens in (2048, 4096))
    assert 0 < few < many < 2.1 * few


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TrainerConfig]:
    config = make(tmp_path_factory.mktemp("model"), parallelism={"gradientCheckpointing": True})
    return training_model(config), config


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 4000), st.integers(1, 4000), st.sampled_from([1000, tiles.TILE]))
def test_memory_never_shrinks_with_tokens(dense: tuple[Any, TrainerConfig], tokens: int, more: int, tile: int) -> None:
    with replaced((tiles, "TILE", tile)):
        few, many = (on_gpu(activations(*dense, size, 10_000, is_first=False)) for size in (tokens, tokens + more))
    assert few <= many


def test_what_is_inside_an_mlp_exists_for_one_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 8192
    monkeypatch.setitem(SMALL, "intermediate_size", width)
    config = make(tmp_path, parallelism={"gradientCheckpointing": True})
    model = training_model(config)

    def growth(tile: int) -> int:
        monkeypatch.setattr(tiles, "TILE", tile)
        few, many = (activations(model, config, tokens, 10_000, is_first=False).others for tokens in (4096, 8192))
        return many - few

    # What Liger's SwiGLU keeps and the gradient of its product, in bfloat16.
    assert growth(10_000) > 4096 * 3 * width * 2
    assert growth(1024) < 4096 * 0.5 * width * 2


def test_checkpointing_and_host_memory_take_activations_off_the_gpu(tmp_path: Path) -> None:
    def planned(**parallelism: Any) -> Activations:
        config = make(tmp_path, parallelism=parallelism)
        return activations(training_model(config), config, 8192, 1024, is_first=True)

    plain, recomputed = planned(), planned(gradientCheckpointing=True)
    offloaded = planned(gradientCheckpointing=True, offloadActivations=True)
    assert on_gpu(plain) > on_gpu(recomputed)
    # The inputs of both layers, of the last norm and of the output layer, in bfloat16.
    assert offloaded.in_host_memory == pytest.approx(4 * 8192 * 256 * 2, rel=0.01)
    assert (plain.in_host_memory, recomputed.in_host_memory) == (0, 0)


def test_gradients_count_as_far_as_they_are_kept(tmp_path: Path) -> None:
    found = {}
    for stage in (0, 2):
        config = make(tmp_path, parallelism={"zeroStage": stage})
        found[stage] = activations(training_model(config), config, 64, 64, is_first=True)
    assert found[0].gradients > 0
    assert found[2].gradients == 0


def test_nothing_stays_replaced(tmp_path: Path) -> None:
    before = torch.nn.functional.rms_norm, torch.autocast
    config = make(tmp_path)
    activations(training_model(config), config, 64, 64, is_first=True)
    with pytest.raises(ZeroDivisionError), like_a_gpu(training_model(config), liger=True, live=Live()):
        raise ZeroDivisionError
    assert (torch.nn.functional.rms_norm, torch.autocast) == before
    assert make_config("qwen3").model_type == "qwen3"


def test_what_attention_takes_in_its_backward_pass_is_counted() -> None:
    tokens, heads, groups, size = 1000, 8, 2, 64
    query, key = (torch.empty(tokens, count, size, dtype=torch.bfloat16, device="meta") for count in (heads, groups))
    bounds = Bounds(torch.empty(2, dtype=torch.int32, device="meta"), tokens)
    with Live(rounding=1) as live:
        output = varlen(query.requires_grad_(), key.requires_grad_(), key.clone(), bounds, bounds, None, None)
        before = live.now.total()
        output.backward(output.detach())
    gradients = 2 * tokens * size * (heads + 2 * groups)
    # FlashAttention 2: the queries' gradient in float32, and those of keys and values for each query head.
    assert live.peak.total() - before >= gradients + tokens * heads * size * (4 + 2 * 2)
