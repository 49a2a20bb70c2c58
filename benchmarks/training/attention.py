"""Causal attention of one sequence, forward and backward: by FlashAttention 2, with which PyTorch packs, and by cuDNN.

    python -m benchmarks.training.attention --output attention.jsonl
    python -m benchmarks.training.attention --device cpu --length 1000 --output /tmp/smoke.jsonl    # no figures

Shapes are Qwen3-4B's (32 heads, 8 of keys and values, head size 128), in bfloat16. A line has the seconds of the first
call with a new length, medians of a forward and of a backward pass, their TFLOP/s, what both allocate beside their
inputs, and the relative difference of output and gradients: of each kernel to arithmetic in float32 up to 4,096 tokens,
else of cuDNN to FlashAttention 2.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.common.busy import gpu_names
from benchmarks.common.runs import about, append

HEADS, GROUPS, SIZE = 32, 8, 128
LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 50_001, 131_072)
EXACT, REPEATS = 4096, 5


@click.command()
@click.option("--length", "lengths", type=int, multiple=True, default=LENGTHS, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("attention.jsonl"), show_default=True)
def main(lengths: tuple[int, ...], device: str, output: Path) -> None:
    """Measure each length, and append a line for each kernel."""
    import torch

    for length in lengths:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        rows = [torch.randn(length, heads, SIZE, device=device, dtype=dtype) for heads in (HEADS, GROUPS, GROUPS)]
        inputs = [one.requires_grad_() for one in rows]
        gradient = torch.randn_like(inputs[0])
        reference = None
        if length <= EXACT:
            exact = [one.detach().float().requires_grad_() for one in inputs]
            reference = passes(kernels(device, length)["exact"], exact, gradient.float())
        for name in ("flash2", "cudnn"):
            line: dict[str, Any] = {"kernel": name, "length": length, "shape": [HEADS, GROUPS, SIZE]}
            measured, results = measure(kernels(device, length)[name], inputs, gradient, device)
            if reference is not None:
                measured["difference"] = [difference(*pair) for pair in zip(results, reference, strict=True)]
            reference = reference or results
            line |= measured | about("benchmarks.training.attention", length=length, device=device)
            line |= {"gpus": gpu_names() if device == "cuda" else []}
            append(output, line)
            print(json.dumps(line), flush=True)


def kernels(device: str, length: int) -> dict[str, Callable[..., Any]]:
    """Return the functions that compare, of queries, keys and values; on CPUs all are PyTorch's arithmetic."""
    import torch

    from grpo_workload.policy.model import attention_kernels as ours

    bounds = ours.Bounds(torch.tensor([0, length], dtype=torch.int32, device=device), length)

    def exact(query: Any, key: Any, value: Any) -> Any:
        return ours.one_by_one(query, key, value, bounds, bounds, None, None)

    if device == "cpu":
        return dict.fromkeys(("exact", "flash2", "cudnn"), exact)
    return {
        "exact": exact,
        "flash2": lambda query, key, value: ours.varlen(query, key, value, bounds, bounds, None, None),
        "cudnn": lambda query, key, value: ours.by_cudnn(query, key, value, bounds, None),
    }


def measure(kernel: Any, inputs: list[Any], gradient: Any, device: str) -> tuple[dict[str, Any], list[Any]]:
    """Return what is measured of a kernel, and its output and gradients."""
    import torch

    def timed(call: Callable[[], Any]) -> float:
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        return time.perf_counter() - begin

    def forward() -> None:
        with torch.no_grad():
            kernel(*inputs)

    def both() -> None:
        passes(kernel, inputs, gradient)

    first = timed(both)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    ahead = statistics.median(timed(forward) for _ in range(REPEATS))
    whole = statistics.median(timed(both) for _ in range(REPEATS))
    taken = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    flops = 4 * HEADS * SIZE * len(gradient) ** 2 / 2
    measured = {"first": round(first, 4), "forward": round(ahead, 5), "backward": round(whole - ahead, 5)}
    measured["forward_tflops"] = round(flops / ahead / 1e12, 1)
    measured["backward_tflops"] = round(2.5 * flops / (whole - ahead) / 1e12, 1)
    return measured | {"gib": round(taken / 2**30, 3)}, passes(kernel, inputs, gradient)


def passes(kernel: Any, inputs: list[Any], gradient: Any) -> list[Any]:
    """Return the output and the gradients of the inputs."""
    for one in inputs:
        one.grad = None
    output = kernel(*inputs)
    output.backward(gradient)
    return [output.detach(), *(one.grad for one in inputs)]


def wait(device: str) -> None:
    """Wait until the GPU has computed all that it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def difference(one: Any, other: Any) -> float:
    """Return the norm of the difference beside the norm of `other`."""
    return float((one.float() - other.float()).norm() / other.float().norm())


if __name__ == "__main__":
    main()
