"""Tokens per second of vLLM as this project samples, compared with plain requests, in alternating rounds.

    python -m benchmarks.generation.sampling --what seeds --size 1.5 --sequences 256 --tokens 256
    python -m benchmarks.generation.sampling --what adapters --size 1.5 --sequences 256 --tokens 256

`seeds`: each request has its own seed, so that samples do not depend on how prompts are spread over engines.
`adapters`: an engine with random adapters of rank 16 on all linear layers, as `lora.push: adapters` has, and an engine
without, on the same device. The model is a random Llama of SIZE billion parameters; every sequence gets TOKENS new
tokens. Prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import make_model
from benchmarks.common.runs import versions

RANK = 16
CACHE_BYTES = {"cuda": 2**34, "cpu": 2**28}


@click.command()
@click.option("--what", type=click.Choice(["seeds", "adapters"]), required=True)
@click.option("--size", default="1.5", show_default=True)
@click.option("--sequences", default=[256], multiple=True, show_default=True, help="A line for each.")
@click.option("--tokens", default=256, show_default=True)
@click.option("--rounds", default=4, show_default=True)
@click.option("--device", type=click.Choice(list(CACHE_BYTES)), default="cuda", show_default=True)
def main(what: str, size: str, sequences: tuple[int, ...], tokens: int, rounds: int, device: str) -> None:
    """Measure and print."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", size, device)
        common: dict[str, Any] = {
            "model": str(model),
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "logprobs_mode": "processed_logprobs",
        }
        common |= {"kv_cache_memory_bytes": CACHE_BYTES[device], "max_num_seqs": 256}
        common |= {"gpu_memory_utilization": 0.3} if device == "cuda" else {}  # two engines may share the device
        plain = LLM(**common)
        sides: dict[str, Callable[[int], float]] = {"plain": lambda number: _seconds(plain, number, tokens)}
        if what == "seeds":
            sides[what] = lambda number: _seconds(plain, number, tokens, first_seed=1000)
        else:
            engine = LLM(**common, enable_lora=True, max_loras=1, max_lora_rank=RANK)
            adapter = LoRARequest("random", 1, str(_random_adapter(model, Path(scratch) / "adapter")))
            sides[what] = lambda number: _seconds(engine, number, tokens, adapter=adapter)
        for number in sequences:
            taken: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(1 + rounds):  # the first compiles
                for name, seconds in sides.items():
                    taken[name].append(seconds(number))
            rates = {name: number * tokens / statistics.median(values[1:]) for name, values in taken.items()}
            result = {
                "size": size,
                "sequences": number,
                "tokens": tokens,
                "tokens_per_second": rates,
                "ratio": rates[what] / rates["plain"],
                "seconds": {name: values[1:] for name, values in taken.items()},
                "versions": versions("torch", "vllm", "transformers", "peft"),
                "command": " ".join(["python -m benchmarks.generation.sampling", *sys.argv[1:]]),
            }
            print(json.dumps(result), flush=True)


def _seconds(llm: Any, sequences: int, tokens: int, *, first_seed: int | None = None, adapter: Any = None) -> float:
    """Seconds for `sequences` completions, eight of each prompt."""
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[5 + index % 200] * 128) for index in range(sequences // 8)]
    common: dict[str, Any] = {"n": 8, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    parameters = [
        SamplingParams(seed=None if first_seed is None else first_seed + index, **common)
        for index in range(len(prompts))
    ]
    start = time.perf_counter()
    llm.generate(prompts, parameters, use_tqdm=False, lora_request=adapter)
    return time.perf_counter() - start


def _random_adapter(model: Path, folder: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16"), config).save_pretrained(str(folder))
    return folder


if __name__ == "__main__":
    main()
