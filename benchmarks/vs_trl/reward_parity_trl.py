"""TRL's side of the reward curves: GRPOTrainer on the prompts of one of our jobs, with its settings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.runs import start_trl_server
from benchmarks.vs_trl.tasks import GENERATIONS, NEW_TOKENS, PROMPTS, RATE, STOPPED, judge
from grpo_cli.local.processes import free_ports
from grpo_workload.algorithm.samples import Prompt

CACHE = 2**30  # bytes of vLLM's KV cache
CONTEXT = 512


def run_trl(
    folder: Path, model: str, prompts: Sequence[Prompt], *, topology: str, seed: int, gpus: str, device: str
) -> tuple[dict[str, list[float]], Path]:
    """Train once. Return the accuracy and the reward of each step, and the folder of the model.

    On a CPU, transformers samples: TRL runs vLLM on GPUs alone.
    """
    _, _, other = gpus.partition(",")
    server = None
    port, group_port, master = free_ports(3)
    if topology == "Server":
        server = start_trl_server(
            model, port=port, context=CONTEXT, cache_bytes=CACHE, device=other, log=folder / "server.log", share=0.05
        )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master)}
    engine: dict[str, Any] = {
        "use_vllm": True,
        "vllm_gpu_memory_utilization": 0.05,
        "vllm_mode": "server" if topology == "Server" else "colocate",
        "vllm_server_base_url": f"http://127.0.0.1:{port}",
        "vllm_group_port": group_port,
        "vllm_max_model_length": CONTEXT,
        "bf16": True,
    }
    try:
        if server is not None:
            _wait_for(port, server, folder / "server.log")
        return _train(folder, model, prompts, seed, engine if device == "cuda" else {"use_cpu": True})
    finally:
        if server is not None:
            os.killpg(server.pid, 15)


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return
    sys.exit(f"TRL's server did not come up:\n{log.read_text()[-3000:]}")


def _train(
    folder: Path, model: str, prompts: Sequence[Prompt], seed: int, options: dict[str, Any]
) -> tuple[dict[str, list[float]], Path]:
    import vllm
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    build = vllm.LLM.__init__
    vllm.LLM.__init__ = lambda llm, *args, **given: build(
        llm, *args, **given | {"kv_cache_memory_bytes": CACHE, "enforce_eager": True}
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert all(
        tuple(tokenizer.apply_chat_template(prompt.text, add_generation_prompt=True, return_dict=False))
        == prompt.token_ids
        for prompt in prompts
    )
    verify = judge()

    def accuracy(completions: list[list[dict[str, str]]], row: list[int], **_: Any) -> list[float | None]:
        return [verify(prompts[at], messages[-1]["content"]) for at, messages in zip(row, completions, strict=True)]

    def stopped(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[-1] == tokenizer.eos_token_id) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        gradient_accumulation_steps=1,
        num_generations=GENERATIONS,
        max_completion_length=NEW_TOKENS,
        max_steps=len(prompts) // PROMPTS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        reward_weights=[1.0, STOPPED],
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=seed,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({"bf16": False} | options),
    )
    dataset = Dataset.from_list([{"prompt": prompt.text, "row": at} for at, prompt in enumerate(prompts)])
    trainer = GRPOTrainer(model=model, reward_funcs=[accuracy, stopped], args=config, train_dataset=dataset)
    trainer.train()
    trainer.save_model(str(folder / "trained"))
    rows = [row for row in trainer.state.log_history if "reward" in row]
    curves = {"accuracy": [row["rewards/accuracy/mean"] for row in rows], "reward": [row["reward"] for row in rows]}
    return curves, folder / "trained"
