"""Most tokens that one micro-batch may hold, for our trainer and TRL's: 7B with LoRA, forward and backward pass.

    python -m benchmarks.vs_trl.token_budget --side ours --lengths lognormal --output budget.jsonl

One GPU, capped at a size. No engine is loaded: a sleeping one takes the same memory on both sides. A sequence is a
prompt of 256 tokens and a completion of 512, or of log-normal length as in `trainer.py`; a micro-batch is the first n
of them. n is doubled until memory runs out, then narrowed down. TRL pads.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common.lengths import PROMPT_TOKENS, lognormal
from benchmarks.common.metered import GIB
from benchmarks.common.models import make_model
from benchmarks.common.ours_micro import WORDS, Micro, ours
from benchmarks.common.runs import append, versions

LORA = {"r": 16, "alpha": 32}


@click.command()
@click.option("--side", type=click.Choice(["ours", "trl"]), required=True)
@click.option("--lengths", type=click.Choice(["equal", "lognormal"]), default="equal", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("budget.jsonl"), show_default=True)
@click.option("--size", default="7", show_default=True, help="Billions of parameters, or tiny.")
@click.option("--cap", default=80.0, show_default=True, help="GiB of the device's memory that may be used.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--liger/--no-liger", default=True, show_default=True, help="Liger's layer kernels.")
@click.option(
    "--offload/--no-offload",
    default=False,
    show_default=True,
    help="Ours: keep activations between layers in the host's memory.",
)
@click.option("--profile", is_flag=True, help="Print which lines hold memory at the peak of the largest micro-batch.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Folder of the random model; made if missing.",
)
def main(
    side: str,
    lengths: str,
    output: Path,
    size: str,
    cap: float,
    device: str,
    liger: bool,
    offload: bool,
    profile: bool,
    model: Path | None,
) -> None:
    """Find the largest micro-batch and append a line."""
    import torch

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    drawn = lognormal(4096)
    completions = [512] * 4096 if lengths == "equal" else drawn
    line: dict[str, Any] = {"side": side, "lengths": lengths, "size": size, "lora": LORA, "cap_gib": cap}
    line |= {"liger": liger, "offload": offload}
    line["versions"] = versions("torch", "transformers", "deepspeed", "trl", "peft")
    line["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    line["command"] = " ".join(["python -m benchmarks.vs_trl.token_budget", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        model = make_model(model or Path(scratch) / "model", size, device, kind="qwen2", max_length=4096)
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(cap * GIB / torch.cuda.get_device_properties(0).total_memory)
        try:
            if side == "ours":
                _, micro = ours(
                    model, device, liger=liger, lora=LORA, parallelism={"offloadActivations": True} if offload else {}
                )
            else:
                micro = _trl(model, device, liger)
            micro(completions[:1])  # makes the allocations that happen only once
            line |= largest_batch(micro, completions, 2 if device == "cpu" else 4096)
        except Exception as error:  # the line has the cause, whatever it is
            line["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    append(output, line)
    print(json.dumps(line), flush=True)
    if profile and "error" not in line:
        from benchmarks.common import memory_peak

        before = memory_peak.start()
        micro(completions[: line["sequences"]])
        print(memory_peak.table(before), flush=True)
    os._exit("error" in line)  # libraries' process groups and engines would wait for one another


def largest_batch(micro: Micro, completions: list[int], largest: int) -> dict[str, int]:
    """Find the largest number of sequences that fits, at most `largest`.

    Returns that number, its tokens, and its tokens per second, the faster of two runs.
    """
    best = search(micro, completions, largest)
    while (
        len(seconds := attempts(micro, completions[:best], 2)) < 2
    ):  # fitting once may be the allocator's luck: it must fit again
        if best == 1:
            raise RuntimeError("not even one sequence fits again")
        best -= max(1, best // 50)
    tokens = sum(PROMPT_TOKENS + one for one in completions[:best])
    return {"sequences": best, "tokens": tokens, "tokens_per_second": round(tokens / min(seconds))}


def search(micro: Micro, completions: list[int], largest: int) -> int:
    """Largest number of completions that fits, to within 5%."""
    fits, fails = 1, largest + 1
    number = min(64, largest)
    while fails - fits > max(1, 0.05 * fits):
        if attempts(micro, completions[:number], 1):
            fits = number
            number = min(2 * fits, (fits + fails) // 2) if fails > largest else (fits + fails) // 2
        else:
            fails = number
            number = (fits + fails) // 2
        number = max(number, fits + 1)
    return fits


def attempts(micro: Micro, completions: list[int], times: int) -> list[float]:
    """Seconds of a micro-batch, run `times` times or as often as memory allows, from an empty allocator cache."""
    import gc

    import torch

    from benchmarks.common.metered import now

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds: list[float] = []
    try:
        while len(seconds) < times:
            start = now()
            micro(completions)
            seconds.append(now() - start)
    except torch.OutOfMemoryError:
        return seconds
    return seconds


def _trl(model: Path, device: str, liger: bool) -> Micro:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=2048,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=False,
        use_liger_kernel=liger and device == "cuda",
        use_cpu=device == "cpu",
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
        peft_config=LoraConfig(
            r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=config.gradient_checkpointing_kwargs
    )  # as above
    wrapped = trainer.accelerator.prepare_model(trainer.model)
    if liger and device == "cuda":
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(
            trainer.model, config.liger_kernel_config
        )  # as transformers' Trainer does when training starts
    wrapped.train()
    trainer.current_gradient_accumulation_steps = 1
    rng = np.random.default_rng(0)

    def micro(completions: list[int]) -> None:
        longest = max(completions)
        mask = torch.tensor([[1] * length + [0] * (longest - length) for length in completions])
        inputs = {
            "prompt_ids": torch.ones(len(completions), PROMPT_TOKENS, dtype=torch.long),
            "prompt_mask": torch.ones(len(completions), PROMPT_TOKENS, dtype=torch.long),
            "completion_ids": torch.from_numpy(rng.integers(WORDS, size=tuple(mask.shape))),
            "completion_mask": mask,
            "advantages": torch.full((len(completions),), 0.5),
            "num_items_in_batch": torch.tensor(sum(completions)),
        }
        inputs = {name: tensor.to(trainer.accelerator.device) for name, tensor in inputs.items()}
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(wrapped, inputs)
        trainer.accelerator.backward(loss)
        if device == "cuda":
            torch.cuda.synchronize()

    return micro


if __name__ == "__main__":
    main()
