"""Router replay on one device: how far the trainer is from what a colocated vLLM samples, in bfloat16.

    python -m benchmarks.weights.router_replay --device cuda --family qwen3_moe --family mixtral --output replay.jsonl

Models have random weights, 8 layers, and 32 experts, of which each token takes 4. A line says, with the experts that
vLLM chose (`replayed`) and with those that the trainer's routers choose (`own`): `kl`, the metric sampling/kl in nats a
token, and `max`, the largest difference of log-probabilities. On a GPU vLLM itself returns the experts.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click
import torch

from benchmarks.common.runs import about, append
from benchmarks.weights.family_sizes import ON_A_GPU, SIZES
from benchmarks.weights.train_families import run_alone
from support.families import FAMILIES, make_routed_model
from support.trainer.tiny_model import make_tiny_tokenizer

LAYERS, EXPERTS, CHOSEN = 8, 32, 4
NAMES = ("num_experts", "num_local_experts", "n_routed_experts")  # of the number of experts, in one family or another


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--family", "families", multiple=True, default=("qwen3_moe", "mixtral"), show_default=True)
@click.option("--timeout", default=600, show_default=True, help="Longest time for one line, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("router_replay.jsonl"), show_default=True)
def main(device: str, families: tuple[str, ...], timeout: int, output: Path) -> None:
    """Run the program for each family, and append a line for each."""
    head = {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU"}
    head |= about("benchmarks.weights.router_replay", device=device)
    tokenizer = make_tiny_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    for family in families:
        sizes = SIZES | ON_A_GPU.get(family, {}) | {"num_hidden_layers": LAYERS, "num_experts_per_tok": CHOSEN}
        sizes |= {name: EXPERTS for name in NAMES if name in FAMILIES[family]}
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / family
            make_routed_model(family, **sizes, **ids).to(torch.bfloat16).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            result, _ = run_alone(["router_replay.py", str(folder), device, "bfloat16"], Path(scratch), timeout)
            result = result or json.loads((Path(scratch) / "result-0.json").read_text())
        line = {"family": family, **result}
        print(line, flush=True)
        append(output, line | head)


if __name__ == "__main__":
    main()
