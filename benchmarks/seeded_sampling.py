"""Tokens a second of vLLM with a seed for every request, which makes samples independent of how prompts are spread, and without.

A random Llama of SIZE billion parameters; every sequence has TOKENS new tokens. Rounds of both alternate. Prints one JSON line.

    python benchmarks/seeded_sampling.py --size 1.5 --sequences 256 --tokens 256
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
from models import make_model
from runs import versions


@click.command()
@click.option("--size", default="1.5")
@click.option("--sequences", default=256)
@click.option("--tokens", default=256)
@click.option("--rounds", default=4)
@click.option("--device", default="cuda")
def main(size: str, sequences: int, tokens: int, rounds: int, device: str) -> None:
    """Measure and print."""
    from vllm import LLM, SamplingParams, TokensPrompt

    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", size, device)
        llm = LLM(model=str(model), dtype="bfloat16", max_model_len=1024, gpu_memory_utilization=0.4, logprobs_mode="processed_logprobs")
        prompts = [TokensPrompt(prompt_token_ids=[5 + index % 200] * 128) for index in range(sequences // 8)]

        def seconds(seeded: bool) -> float:
            common = {"n": 8, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
            parameters = [SamplingParams(seed=1000 + index if seeded else None, **common) for index in range(len(prompts))]
            start = time.perf_counter()
            llm.generate(prompts, parameters, use_tqdm=False)
            return time.perf_counter() - start

        seconds(True), seconds(False)
        taken = {name: [] for name in ("seeded", "plain")}
        for _ in range(rounds):
            taken["seeded"].append(seconds(True))
            taken["plain"].append(seconds(False))
    rates = {name: sequences * tokens / statistics.median(values) for name, values in taken.items()}
    result = {
        "size": size,
        "sequences": sequences,
        "tokens": tokens,
        "tokens_per_second": rates,
        "ratio": rates["seeded"] / rates["plain"],
        "seconds": taken,
        "versions": versions("torch", "vllm", "transformers"),
        "command": " ".join(["python", "benchmarks/seeded_sampling.py", *sys.argv[1:]]),
    }
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
