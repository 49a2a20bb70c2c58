"""A group's prompt that the model is fed once, beside once for each completion: tokens per second of a training pass.

    python -m benchmarks.training.prompt_once --output prompt_once.jsonl
    python -m benchmarks.training.prompt_once --device cpu --size tiny --output /tmp/smoke.jsonl   # no figures

A random model of Qwen3-4B's shape, forward and backward passes of one group in the micro-batches that a plan makes of
it, without optimizer steps and engine. Tokens are those of all sequences, each with its prompt, in both layouts, so
their ratio is that of the times. Three passes are timed after one that is not; a line has all of them.

With adapters: 8 completions of 256 tokens, prompts of 1k to 16k. With `nothing`: one completion of a prompt, where
nothing is shared, so that the same code runs: both layouts by turns, ten passes of each, and what planning takes. With
all weights: 4 completions at a context of 8k, where verl says 1.70x for the update with its prefix grouper
on four H800 (volcengine/verl#4368; it does not say how long completions are). With `trl`:
the cases with adapters by TRL's AsyncGRPO (`vs_trl/tree_rows.py`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import config_of, write_weights
from benchmarks.common.runs import about, append, set_alone, versions
from benchmarks.vs_trl.tree_rows import Passes, trl_passes

GIB = 2**30
LORA = {"r": 16, "alpha": 32}
CASES = {  # prompt tokens, completions, completion tokens
    "lora": ((1024, 8, 256), (4096, 8, 256), (8192, 8, 256), (16384, 8, 256)),
    "nothing": ((4096, 1, 256), (4096, 1, 4096)),
    "trl": ((1024, 8, 256), (4096, 8, 256), (8192, 8, 256), (16384, 8, 256)),
    "full": ((4096 - 1024, 4, 1024), (8192 - 1024, 4, 1024)),
}
TIMES, TURNS = 3, 10


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--size", type=click.Choice(["4", "tiny"]), default="4", show_default=True)
@click.option("--budget", default=32768, show_default=True, help="Tokens of a micro-batch.")
@click.option("--only", type=click.Choice(list(CASES)), help="All without it.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("prompt_once.jsonl"), show_default=True)
@click.option("--child", is_flag=True, hidden=True)
def main(only: str | None, output: Path, child: bool, **options: Any) -> None:
    """Measure, and append a line for each case and layout."""
    if child:
        assert only is not None
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
            measure(Path(scratch), only, output, **options)
        os._exit(0)  # process groups would wait for one another
    for kind in [only] if only else CASES:
        arguments = [f"--{name}={value}" for name, value in {**options, "output": output}.items()]
        command = [sys.executable, "-m", "benchmarks.training.prompt_once", "--child", f"--only={kind}", *arguments]
        if subprocess.run(command).returncode:  # the next may work
            print(f"{kind} failed", flush=True)


def measure(folder: Path, kind: str, output: Path, device: str, size: str, budget: int) -> None:
    """Load the policy, and measure the cases of a kind in both layouts."""
    set_alone()
    from grpo_spec.contract import Device
    from grpo_workload.ranks import environment

    environment.prepare(Device(device), os.environ)
    is_tiny, longest = size == "tiny", max(sum(case[::2]) for case in CASES[kind])
    budget = 512 if is_tiny else budget
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "head_dim": 32 if is_tiny else 128}
    write_weights(folder, config_of("qwen3", size, max_position_embeddings=longest, **special), device)
    passes = trl_passes(folder, device, budget, LORA) if kind == "trl" else our_passes(folder, device, budget, kind)
    for case in CASES[kind]:
        prompt_tokens, completions, completion_tokens = (case[0] // 64, case[1], case[2] // 64) if is_tiny else case
        if kind == "nothing":
            both = by_turns(passes, (prompt_tokens, completions, completion_tokens), device)
            append(output, both | about("benchmarks.training.prompt_once", only=kind, device=device, size=size))
            print(json.dumps(both), flush=True)
            continue
        before: dict[str, Any] = {}
        for shares in [True] if kind == "trl" else [False, True]:
            line: dict[str, Any] = {"kind": kind, "prompt_tokens": prompt_tokens, "completions": completions}
            line |= {"completion_tokens": completion_tokens, "shares_prompts": shares}
            tokens = completions * (prompt_tokens + completion_tokens)
            try:
                run, line["fed_tokens"], line["micro_batches"] = passes(*case_of(line), shares)
                line |= timed(run, tokens, device)
                if before:
                    line["times_faster"] = round(line["tokens_per_second"] / before["tokens_per_second"], 3)
                before = line
            except Exception as error:  # the line has the cause, whatever it is
                line["error"] = f"{type(error).__name__}: {error}"
            line |= about("benchmarks.training.prompt_once", only=kind, device=device, size=size, budget=budget)
            line["versions"] |= versions("trl") if kind == "trl" else {}
            append(output, line)
            shown = ("kind", "prompt_tokens", "completions", "shares_prompts", "fed_tokens", "tokens_per_second")
            named = {name: line.get(name) for name in (*shown, "times_faster", "peak_gib", "error")}
            print(json.dumps(named), flush=True)


def case_of(line: dict[str, Any]) -> tuple[int, int, int]:
    """Return prompt tokens, completions, and tokens of each."""
    return line["prompt_tokens"], line["completions"], line["completion_tokens"]


def by_turns(passes: Passes, case: tuple[int, int, int], device: str) -> dict[str, Any]:
    """Time both layouts of a case in which nothing is shared, one after the other."""
    started = [time.perf_counter()]
    both = []
    for shares in (False, True):
        both.append(passes(*case, shares))
        started.append(time.perf_counter())
    assert both[0][1:] == both[1][1:], "something is shared"
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(2 + TURNS):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            both[which][0]()
            if number > 1:
                seconds[which].append(round(time.perf_counter() - start, 4))
    prompt_tokens, completions, completion_tokens = case
    found = {"kind": "nothing", "prompt_tokens": prompt_tokens, "completions": completions}
    found |= {"completion_tokens": completion_tokens, "fed_tokens": both[0][1], "seconds": list(seconds)}
    found |= {"planned_seconds": [round(end - begin, 4) for begin, end in pairwise(started)]}
    found |= {"times_slower": round(statistics.median(seconds[1]) / statistics.median(seconds[0]), 4)}
    return found | {"device": device} | ({"gpu": _gpu()} if device == "cuda" else {})


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def our_passes(folder: Path, device: str, budget: int, kind: str) -> Passes:
    """Load the policy, and return the passes of a group."""
    import torch

    from grpo_spec.contract import Device
    from grpo_spec.trainer import TrainerConfig
    from grpo_workload.algorithm.samples import Prompt
    from grpo_workload.algorithm.step_plan import Fact, plan
    from grpo_workload.policy.step.policy import Policy
    from grpo_workload.policy.step.step_sums import StepSums
    from grpo_workload.policy.trials.memory_trial import make_sample, random_ids
    from grpo_workload.training.exchange import micro_batches

    config = TrainerConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "dataset": {"path": "unused"},
            "rewards": [{"name": "unused", "stopped": {}}],
            "training": {"importanceSamplingCorrection": "none", "maxTokensPerMicroBatch": budget},
            "parallelism": {"zeroStage": 0, "optimizerDtype": "bfloat16", "gradientCheckpointing": True},
        }
        | ({} if kind == "full" else {"lora": LORA})
    )
    policy = Policy(config, Device(device), timeout_seconds=60, pad_token_id=0)
    policy.deepspeed_engine.train()
    assert policy.shares_prompts

    def passes(prompt_tokens: int, completions: int, completion_tokens: int, shares: bool) -> Any:
        ids = random_ids(policy, prompt_tokens + completions * completion_tokens)
        prompt = Prompt(index=0, text="", token_ids=ids[:prompt_tokens])
        starts = range(prompt_tokens, len(ids), completion_tokens)
        samples = [make_sample(prompt, ids[start : start + completion_tokens]) for start in starts]
        fact = Fact(prompt_tokens, completion_tokens, False, 0.0, 1.0, prompt=(0, prompt_tokens))
        made = plan([[fact] * completions], config.training, shares_prompts=shares)
        batches = list(micro_batches(made, samples, 0))

        def run() -> None:
            for batch in batches:
                policy.deepspeed_engine.set_gradient_accumulation_boundary(False)
                policy.passes.backward(batch.to(policy.device), made.scale, StepSums())
            if device == "cuda":
                torch.cuda.synchronize()

        return run, made.fed_tokens(0), len(batches)

    return passes


def timed(run: Callable[[], None], tokens: int, device: str) -> dict[str, Any]:
    """Run once to warm up and then `TIMES` times; return the seconds of each, and the tokens of the median second."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(1 + TIMES):
        start = time.perf_counter()
        run()
        if number:
            seconds.append(round(time.perf_counter() - start, 4))
    found: dict[str, Any] = {"seconds": seconds, "tokens_per_second": round(tokens / statistics.median(seconds))}
    if device == "cuda":
        found |= {"peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2), "gpu": torch.cuda.get_device_name()}
    return found


if __name__ == "__main__":
    main()
