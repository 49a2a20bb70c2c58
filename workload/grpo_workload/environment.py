"""Variables that torch, accelerate, DeepSpeed and vLLM read while they are imported. Torch-free, so that it can come first."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from grpo_workload.contract import Device


def prepare(device: Device, environ: MutableMapping[str, str], *, is_engine_split: bool = False) -> None:
    """Set them for a rank; what the user has set stays, except where the trainer would not work.

    Args:
        device: of the job.
        environ: the rank's variables, which are changed.
        is_engine_split: ranks hold one copy of the model for generation together.
    """
    environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs inside the rank
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not is_engine_split:
        # Micro-batches differ in size: between segments of fixed sizes about 1 GiB lies idle (1.5B, 6000 tokens). Where an engine is split,
        # vLLM's all-reduce shares memory between processes, which this kind cannot be.
        environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if device == Device.CPU:
        environ["DS_ACCELERATOR"] = "cpu"
        # vLLM would bind each engine to the first cores it finds, the same ones in every rank.
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = len(os.sched_getaffinity(0)) // int(environ.get("LOCAL_WORLD_SIZE", "1"))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
