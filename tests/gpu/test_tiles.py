"""MLPs in tiles on a GPU, with fused kernels and offloaded activations: gradients of whole ones, in less memory."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_workload.policy.memory.activation_offload import Activations
from grpo_workload.policy.model import tiles
from grpo_workload.policy.model.load import fuse

TOKENS, WIDTH = 8192, 8192


@pytest.mark.parametrize("offloads", [False, True])
def test_gradients_are_those_of_whole_mlps_in_less_memory(offloads, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 1000)
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=100, hidden_size=512, intermediate_size=WIDTH, num_hidden_layers=3)
    config.num_attention_heads, config.num_key_value_heads = 8, 8
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
    fuse(model)
    tiles.wrap(model)
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    ids = torch.randint(0, 100, (1, TOKENS), device="cuda")
    moving = Activations(torch.device("cuda")) if offloads else None
    found = []
    for on in (False, True):
        tiles.turn(model, on=on)
        for _ in range(2):  # the first allocates what libraries keep
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with moving.offloaded() if moving else nullcontext():
                loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        gradients = torch.cat([one.grad.flatten().float() for one in model.parameters()])
        found.append((float(loss), gradients, torch.cuda.max_memory_allocated() - before))
    (loss, gradients, whole), (own, tiled, less) = found
    assert own == pytest.approx(loss, rel=1e-3)
    assert float((tiled - gradients).norm() / gradients.norm()) < 0.01
    assert whole - less > 1.9 * TOKENS * WIDTH * 2
