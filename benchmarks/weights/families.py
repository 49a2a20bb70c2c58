"""Families of models on one device, colocated: three pushes of changed weights each, and what vLLM then computes.

    python -m benchmarks.weights.families --device cuda --at-once 12 --output families.jsonl
    python -m benchmarks.weights.families --device cpu --family llama --output families.jsonl

Models are those of tests/support/families.py, with random weights: bfloat16 on a GPU and with a gated delta net, else
float32. A line says by how much log-probabilities of vLLM and the trainer differ after each push (mean over 256 tokens,
in nats), and by how much before each of the two pushes of changed weights; or the error that ended it. Modes: `all`,
full weights under ZeRO-2; `adapters`, LoRA under ZeRO-2; `zero3`, full weights under ZeRO-3.
tests/trainer/programs/family_pushes.py does the work, in a process of its own for each line.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import ROOT
from benchmarks.common.runs import about, append
from support.families import FAMILIES, MASKED, STATEFUL, make_model
from support.trainer.only_rank import only_rank
from support.trainer.tiny_model import make_tiny_tokenizer

PROGRAMS = ROOT / "tests" / "trainer" / "programs"
MODES = ("all", "adapters", "zero3")
# Kernels of a GPU want heads of 64 and more.
SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 256}
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
LATENT |= {"num_key_value_heads": SIZES["num_attention_heads"]}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64}
ON_A_GPU: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 8},  # kernels of a GPU want weights that begin at multiples of 16 bytes
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS,
    "qwen3_next": EXPERTS | DELTA,
    "qwen3_5": DELTA,
    "qwen3_5_moe": EXPERTS | DELTA,
    "qwen3_5_text": DELTA,
    "glm4_moe_lite": EXPERTS | LATENT,
    "deepseek_v3": EXPERTS | LATENT,
    "deepseek_v32": EXPERTS | LATENT,
    "lfm2": {"block_dim": 512, "conv_dim": 512},
    "granitemoehybrid": MAMBA,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 1024},
    **dict.fromkeys(("dots1", "solar_open", "mellum", "exaone_moe", "ernie4_5_moe", "afmoe", "lfm2_moe"), EXPERTS),
    "hy_v3": EXPERTS | {"expert_hidden_dim": 256},
    "gemma3n_text": {"intermediate_size": [512] * 4},
    "gpt2": {"n_inner": 512},
    "gpt_neox": {"num_key_value_heads": SIZES["num_attention_heads"]},
    "minicpm3": LATENT,
    "deepseek_v2": EXPERTS | LATENT,
    "glm_moe_dsa": EXPERTS | LATENT | {"index_head_dim": 128},
    "qwen3_5_moe_text": EXPERTS | DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": EXPERTS | LATENT | {"linear_head_dim": 128},
}
# Than the program's sequences: vLLM's windows of Cohere hold one token more than transformers'; its chunks are blocks.
LONGER: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 512},
    "cohere2_moe": {"sliding_window": 512},
    "llama4_text": {"attention_chunk_size": 512},
}
GATED_DELTA_NET = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
)
PUSHED = re.compile(r"after the push of version \d, log-probabilities differ by (\S+) at most")
NOT_PUSHED = re.compile(r"not pushed: log-probabilities differ by (\S+)")
ERROR = re.compile(r"^(?:\[rank0\]: )?(?:\w+\.)*(\w+(?:Error|Exception): .*)$", re.MULTILINE)
ERROR_CHARS = 400


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--family", "families", multiple=True, help="All that are tested, if not given.")
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=MODES, show_default=True)
@click.option("--at-once", default=1, show_default=True, help="Processes side by side.")
@click.option("--timeout", default=300, show_default=True, help="Longest time for one line, in seconds.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("families.jsonl"), show_default=True)
def main(
    device: str, families: tuple[str, ...], modes: tuple[str, ...], at_once: int, timeout: int, output: Path
) -> None:
    """Run the program for each family and mode, and append a line for each."""
    names = families or (*FAMILIES, *STATEFUL, *MASKED)
    head = {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU"}
    head |= about("benchmarks.weights.families", device=device)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(at_once) as threads:
        tokenizer = make_tiny_tokenizer()
        for family in names:
            fields = SIZES | ON_A_GPU.get(family, {}) if device == "cuda" else {}
            fields |= LONGER.get(family, {})
            ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
            # vLLM's kernels of the gated delta net on CPUs take no other type than bfloat16.
            dtype = torch.bfloat16 if device == "cuda" or family in GATED_DELTA_NET else torch.float32
            try:
                make_model(family, whole=True, **fields, **ids).to(dtype).save_pretrained(Path(scratch) / family)
            except Exception as error:  # of this family alone; its lines say that there is no model
                print(f"no model of {family}: {error}", flush=True)
            tokenizer.save_pretrained(Path(scratch) / family)

        def measure(mode: str, family: str) -> None:
            result = _push(Path(scratch) / family, mode, device, timeout)
            line = {"family": family, "mode": mode, **result}
            print(line, flush=True)
            append(output, line | head)

        for done in [threads.submit(measure, mode, family) for mode in modes for family in names]:
            done.result()


def _push(model: Path, mode: str, device: str, timeout: int) -> dict[str, Any]:
    trains, stage = "adapters" if mode == "adapters" else "all", "3" if mode == "zero3" else "2"
    # FlashInfer would compile its kernels of the gated delta net for minutes.
    kernels = {"gdn_prefill_backend": "triton"} if device == "cuda" and model.name in GATED_DELTA_NET else {}
    attention = "eager" if model.name in MASKED else "varlen"
    command = ["family_pushes.py", str(model), trains, device, stage, attention, json.dumps(kernels)]
    result, output = run_alone(command, model.parent, timeout)
    for name, pattern in (("pushed", PUSHED), ("not_pushed", NOT_PUSHED)):
        result[name] = [float(difference) for difference in pattern.findall(output)]
    return result


def run_alone(command: list[str], folder: Path, timeout: int) -> tuple[dict[str, Any], str]:
    """Run one of PROGRAMS as the only rank; return its error, if there is one, and its output.

    Args:
        command: name of the program, the model's folder, and further arguments.
        folder: where the program writes its result.
        timeout: in seconds.
    """
    env = os.environ | only_rank() | {"RESULTS": str(folder)}
    program, *arguments = command
    try:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / program), *arguments],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout} s"}, ""
    if done.returncode == 0:
        return {}, done.stdout
    errors = ERROR.findall(done.stderr) or [f"exit code {done.returncode}"]
    named = [error for error in errors if error.startswith("ConfigError")]  # others are its cause, or follow from it
    return {"error": (named or errors)[0].replace(str(Path(arguments[0]).parent), "")[:ERROR_CHARS]}, done.stdout


if __name__ == "__main__":
    main()
