"""Times a layer of experts with transformers' kernels and with Liger's.

    python -m benchmarks.training.expert_layer --output expert_layer.jsonl

One GPU, the experts of one layer of Qwen3-30B-A3B with random weights in bfloat16, forward and backward pass, random
routes. `liger, one configuration` is Liger's kernel with LIGER_FUSED_MOE_AUTOTUNE=0; without that, it compiles and
times each of its kernels in up to 40 configurations. The first pass includes what is compiled.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.common.metered import GIB, now
from benchmarks.common.runs import append, versions

KINDS = ("grouped_mm", "eager", "liger, one configuration", "liger")
SHAPE = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
TOKENS = (4096, 16384)


@click.command()
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--timeout", default=600, show_default=True, help="Longest time for one kind, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("expert_layer.jsonl"), show_default=True)
@click.option("--here", is_flag=True, hidden=True)
def main(kinds: tuple[str, ...], rounds: int, timeout: int, output: Path, here: bool) -> None:
    """Measure each kind in a process of its own, and append a line for each number of tokens."""
    for kind in kinds:
        if here:
            for tokens in TOKENS:
                append(output, _measure(kind, tokens, rounds))
            continue
        pinned = {"LIGER_FUSED_MOE_AUTOTUNE": "0"} if "one" in kind else {}
        own = ["--here", "--kind", kind, "--rounds", str(rounds), "--output", str(output)]
        command = [sys.executable, "-m", "benchmarks.training.expert_layer", *own]
        subprocess.run(command, env=os.environ | pinned, check=True, timeout=timeout)


def _measure(kind: str, tokens: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    experts = _layer(kind).to("cuda", torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    hidden = torch.randn(tokens, SHAPE["hidden_size"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.rand(tokens, SHAPE["num_experts"], device="cuda").topk(SHAPE["num_experts_per_tok"]).indices
    weights = torch.rand(chosen.shape, device="cuda", dtype=torch.bfloat16)

    def step() -> float:
        began = now()
        experts(hidden, chosen, weights).square().mean().backward()
        return now() - began

    first = step()
    torch.cuda.reset_peak_memory_stats()
    seconds = [step() for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated()
    line = {"kind": kind, "tokens": tokens, "first_s": round(first, 2)}
    line |= {"ms": round(1000 * statistics.median(seconds), 2), "peak_gib": round(peak / GIB, 2)}
    named = versions("torch", "triton", "transformers", "liger_kernel")
    return line | {"device": torch.cuda.get_device_name(), "versions": named}


def _layer(kind: str) -> Any:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**SHAPE, num_hidden_layers=1)
    if kind.startswith("liger"):
        from liger_kernel.transformers.swiglu import LigerExperts

        return LigerExperts(config)
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config._experts_implementation = kind
    return Qwen3MoeExperts(config)


if __name__ == "__main__":
    main()
