"""Random models of the shapes people train: a benchmark needs their bytes, not their weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

SHAPES = {  # hidden size, intermediate size, layers, heads, key/value heads: Qwen2.5's, and some of Qwen3
    "tiny": (64, 128, 2, 2, 2),
    "0.1": (512, 2048, 12, 8, 4),
    "0.6": (1024, 3072, 28, 16, 8),
    "4": (2560, 9728, 36, 32, 8),
    "8": (4096, 12288, 36, 32, 8),
    "0.5": (896, 4864, 24, 14, 2),
    "1.5": (1536, 8960, 28, 12, 2),
    "3": (2048, 11008, 36, 16, 2),
    "7": (3584, 18944, 28, 28, 4),
    "14": (5120, 13824, 48, 40, 8),
    "32": (5120, 27648, 64, 40, 8),
}
TIED = ("tiny", "0.1", "0.5", "0.6", "1.5", "3", "4")
VOCABULARY = 151_936


def config_of(kind: str, size: str, **fields: Any) -> Any:
    """Return transformers' configuration of a family, of a shape of `SHAPES`, with further fields."""
    from transformers import AutoConfig

    hidden, intermediate, layers, heads, kv_heads = SHAPES[size]
    shape = {
        "vocab_size": VOCABULARY if size != "tiny" else 512,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": size in TIED,
    }
    return AutoConfig.for_model(kind, **shape | fields)


def write_weights(folder: Path, config: Any, device: str) -> None:
    """Write a random model of a configuration in bfloat16, without a tokenizer, and free the device's memory."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def make_model(folder: Path, size: str, device: str, *, kind: str = "llama", max_length: int = 2048) -> Path:
    """Write a random model of `size` in bfloat16, with the tiny byte tokenizer, unless `folder` exists.

    `kind` is llama or qwen2. A child process makes it, so that the device's memory is free afterwards. All tokens that
    it samples have a text: for a row of tokens without one, vLLM's time grows with its square.
    """
    if not folder.exists():
        command = [
            sys.executable,
            "-m",
            "benchmarks.common.models",
            str(folder),
            "--size",
            size,
            "--device",
            device,
            "--kind",
            kind,
        ]
        subprocess.run([*command, "--max-length", str(max_length)], check=True)
    return folder


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", type=click.Choice(list(SHAPES)), required=True)
@click.option("--device", required=True)
@click.option("--kind", type=click.Choice(["llama", "qwen2"]), required=True)
@click.option("--max-length", type=int, required=True)
def main(folder: Path, size: str, device: str, kind: str, max_length: int) -> None:
    """Make the model in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    from support.trainer.tiny_model import make_tiny_tokenizer

    vocabulary = VOCABULARY if size != "tiny" else 512
    tokenizer = make_tiny_tokenizer(vocabulary - len(make_tiny_tokenizer()))
    config = config_of(
        kind,
        size,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(before)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
