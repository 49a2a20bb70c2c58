"""The two trainers of `trainer.py` with equal settings: TRL's GRPOTrainer, and our rank with an operator's contract."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS, PROMPT_TOKENS
from benchmarks.common.metered import prompts, reward
from benchmarks.common.runs import REWARDS, set_alone

MICRO_BATCH = 8
LARGE_MICRO_BATCH = 32
PACKED_TOKENS = 8192
OPTIONS = {
    "trl": {"corrected", "fp32", "nockpt", "autocast", "flex", "liger", "norng", "expandable", "large"},
    "ours": {"corrected", "bypass", "fp32", "nockpt", "noliger", "uncapped", "default"},
}

Prepared = tuple[Callable[[], object], Callable[[], list[dict[str, Any]]]]
"""A function that trains, and one that returns the metrics of the steps so far."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The settings that one process measures."""

    side: str
    lengths: str
    options: frozenset[str]
    name: str
    changes: tuple[str, ...]  # settings of our job

    @property
    def micro_batch(self) -> int | None:
        """Sequences of a micro-batch; None: as many tokens as ours chooses."""
        if self.options & {"default", "uncapped"}:
            return None
        return LARGE_MICRO_BATCH if "large" in self.options else MICRO_BATCH

    @classmethod
    def parse(cls, name: str, changes: tuple[str, ...]) -> Row:
        """Parse SIDE-LENGTHS[-OPTION...]. Raises UsageError for a row that does not exist."""
        side, lengths, *options = name.split("-")
        if side not in OPTIONS or lengths not in ("equal", "lognormal") or not OPTIONS[side].issuperset(options):
            raise click.UsageError(f"there is no row {name}")
        return cls(side=side, lengths=lengths, options=frozenset(options), name=name, changes=changes)

    def prepare(self, model: Path, device: str, *, longest: int) -> Prepared:
        """Load everything that is not part of a step; completions have at most `longest` tokens."""
        return (_trl if self.side == "trl" else _ours)(self, model, device, longest)


def _trl(row: Row, model: Path, device: str, longest: int) -> Prepared:
    """TRL's trainer, without torchrun's variables: accelerate would set up a process group for one GPU, at a cost."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    patch_engine(device)
    is_half = "fp32" not in row.options
    micro_batch = row.micro_batch or MICRO_BATCH
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=model.parent),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=NUM_PROMPTS * NUM_GENERATIONS // micro_batch,
        num_generations=NUM_GENERATIONS,
        max_completion_length=longest,
        max_steps=100,
        learning_rate=1e-6,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_enable_sleep_mode=device == "cuda",  # level 2
        vllm_max_model_length=PROMPT_TOKENS + longest,
        vllm_importance_sampling_correction="corrected" in row.options,
        vllm_importance_sampling_mode="sequence_mask",
        gradient_checkpointing="nockpt" not in row.options,
        gradient_checkpointing_kwargs={"use_reentrant": False}
        | ({"preserve_rng_state": False} if "norng" in row.options else {}),
        bf16=device == "cuda" and (not is_half or "autocast" in row.options),
        use_liger_kernel="liger" in row.options,
        use_cpu=device == "cpu",
        model_init_kwargs={
            "dtype": "bfloat16" if is_half else "float32",
            "attn_implementation": "flex_attention" if "flex" in row.options else "sdpa",
        },
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts()])
    trainer = GRPOTrainer(model=str(model), reward_funcs=[reward], args=config, train_dataset=dataset)
    return trainer.train, lambda: trainer.state.log_history


def our_spec(row: Row, model: Path, folder: Path, device: str, longest: int) -> dict[str, Any]:
    """Return the spec of the job that a row of ours is; its dataset is written into `folder`."""
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()))
    is_half = "fp32" not in row.options
    correction = "sequence_mask" if "corrected" in row.options else "bypass" if "bypass" in row.options else "none"
    spec: dict[str, Any] = {
        "device": {"type": device},
        "model": {"path": str(model)} | ({"useLigerKernel": False} if "noliger" in row.options else {}),
        "dataset": {"path": str(folder / "data.jsonl")},
        "rewards": REWARDS,
        "training": {
            "promptsPerStep": NUM_PROMPTS,
            "numGenerations": NUM_GENERATIONS,
            **_micro_batches(row.options),
            "maxCompletionLength": longest,
            "maxSteps": 100,
            "importanceSamplingCorrection": correction,
        },
        "parallelism": {
            "zeroStage": 0 if is_half else 2,
            "optimizerDtype": "bfloat16" if is_half else "float32",
            "gradientCheckpointing": "nockpt" not in row.options,
        },
        "generation": {
            "gpuMemoryUtilization": 0.3,
            "maxModelLen": PROMPT_TOKENS + longest,
            "engineArgs": engine_arguments(device),
        },
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"checkpointEverySteps": 1000},
    }
    if device == "cpu":
        spec["generation"]["kvCacheMemory"] = "256Mi"
    for change in row.changes:
        path, value = change.split("=", 1)
        section, field = path.split(".")
        spec[section][field] = yaml.safe_load(value)
    return spec


def _ours(row: Row, model: Path, device: str, longest: int) -> Prepared:
    folder = Path(tempfile.mkdtemp(dir=model.parent))
    spec = our_spec(row, model, folder, device, longest)
    from grpo_operator.api.spec import parse_spec
    from grpo_operator.layout.contracts import make_contract
    from grpo_operator.layout.job import Job
    from grpo_operator.layout.topology import plan_topology

    job = Job(namespace="bench", name="ours", uid="u", generation=1, spec=parse_spec(spec))
    contract = make_contract(job, plan_topology(job), 0)
    (folder / "contract.json").write_text(contract.model_dump_json(by_alias=True))
    set_alone()
    os.environ.update(
        GRPO_CONTRACT=str(folder / "contract.json"), GRPO_DATA_DIR=str(folder), GRPO_STATE_DIR=str(folder), POD_UID="u"
    )
    from grpo_workload.rank import main

    metrics = folder / contract.job.run / "metrics.jsonl"
    return main, lambda: [json.loads(line) for line in metrics.read_text().splitlines()]


def _micro_batches(options: frozenset[str]) -> dict[str, int]:
    if "default" in options:
        return {}
    tokens = {"maxTokensPerMicroBatch": PACKED_TOKENS}
    return tokens if "uncapped" in options else tokens | {"perDeviceTrainBatchSize": MICRO_BATCH}


def engine_arguments(device: str) -> dict[str, Any]:
    """Arguments of vLLM on both sides.

    Decoding steps use CUDA graphs without compilation, so that a row starts in seconds. The other two are TRL's.
    """
    sequences = NUM_PROMPTS * NUM_GENERATIONS
    if device == "cpu":
        # One chunk: vLLM rewinds the random draws of all chunks but the last, which a CPU's generator cannot.
        return {"enforce_eager": True, "max_num_batched_tokens": 2 * sequences * PROMPT_TOKENS, "block_size": 128}
    arguments = {"max_num_batched_tokens": 4096, "max_num_seqs": sequences}
    if os.environ.get("BENCH_EAGER"):
        return arguments | {"enforce_eager": True}
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64],
    }
    return arguments | {"compilation_config": graphs}


def patch_engine(device: str) -> None:
    """Give TRL's engine the arguments that TRL has no setting for, and on CPUs the one push that works there."""
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm import LLM

    from grpo_workload.generation.vllm_api import repack_for_cpu

    build = LLM.__init__

    def built(llm: Any, *args: Any, **arguments: Any) -> None:
        if device == "cpu":
            arguments |= {"kv_cache_memory_bytes": 2**28, "enable_sleep_mode": False}
        build(llm, *args, **{**arguments, **engine_arguments(device)})

    def push(generation: Any) -> None:
        weights = generation._iter_named_params()
        generation.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": True}
        )
        generation.llm.collective_rpc(lambda worker: repack_for_cpu(worker.get_model()))
        generation.llm.reset_prefix_cache()

    LLM.__init__ = built
    if device == "cpu":
        VLLMGeneration.sync_weights = push
