"""Adapters alone over NCCL to an engine on the second GPU, whose own weights stay: what arrives, and how long it takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_server_nccl import BF16_ERROR, mean_difference, serving
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_workload.config import LoraConfig
from grpo_workload.exports import export
from grpo_workload.lora import Adapters
from grpo_workload.tiny import make_tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]

LORA = LoraConfig(r=4, alpha=6, push="adapters")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Llama of 0.3 billion parameters in bfloat16 on the first GPU, saved where its name says."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        random = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    random.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    random.name_or_path = str(folder)
    return random


def test_adapters_arrive_and_the_models_weights_stay(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path, 1, lora=LORA) as (generator, _):
        adapters = Adapters(model, LORA, seed=0)
        model.to("cuda:0")
        seconds = []
        for version in range(1, 5):
            with torch.no_grad():
                for parameter in adapters.trained():
                    parameter.normal_(std=0.05)
            stale = mean_difference(model, generator)
            start = time.perf_counter()
            generator.sync_weights(export(adapters.pushed(), is_partitioned=False), version)
            seconds.append(round(time.perf_counter() - start, 4))
            fresh = mean_difference(model, generator)
            assert fresh < BF16_ERROR
            assert stale > 5 * fresh
        with adapters.disabled():
            assert mean_difference(model, generator) > 5 * fresh
        print(f"seconds of pushes {seconds}; mean difference {stale:.3f} before, {fresh:.4f} after")  # noqa: T201
