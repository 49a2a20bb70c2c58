"""Variables that torch, accelerate, DeepSpeed, vLLM and peft read at import. Torch-free, so it can run before them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from types import ModuleType

from grpo_spec.contract import Device

ENV_WAITS = "GRPO_RANK_WAITS"
"""Set for a rank that is started ahead of its attempt: it loads its programs, and waits until its launcher writes to
its stdin when the attempt began, in `machine_seconds`.
"""
HIDDEN = ("bitsandbytes", "mlflow")
"""Modules that every rank would import, in a second or two each, and few need: peft imports the first, DeepSpeed's
autotuner the second.
"""


def prepare(device: Device, environ: MutableMapping[str, str], *, is_engine_split: bool = False) -> None:
    """Set a rank's variables. Keeps what the user has set, unless training needs another value.

    Args:
        device: what the job computes on.
        environ: the rank's variables; changed in place.
        is_engine_split: whether several ranks together hold one copy of the model for generation.
    """
    hide()
    environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs inside the rank
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not is_engine_split:
        # Micro-batches differ in size; with segments of fixed sizes about 1 GiB stays unused (1.5B model, 6000 tokens).
        # Not with a split engine: vLLM's all-reduce shares memory between processes, and expandable segments cannot be.
        environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if device == Device.CPU:
        environ["DS_ACCELERATOR"] = "cpu"
        # Otherwise vLLM binds every rank's engine to the same, first cores.
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = len(os.sched_getaffinity(0)) // int(environ.get("LOCAL_WORLD_SIZE", "1"))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))


MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
"""A module of which DeepSpeed wants a class, to ask whether an optimizer is one, which it never is here. To import it
loads torch's compiler, which takes a second.
"""


def hide() -> None:
    """Let no library import the modules in `HIDDEN`, nor `MUON`."""
    for module in HIDDEN:
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]
    sys.modules.setdefault(MUON, ModuleType(MUON)).__dict__.setdefault(
        "MuonWithAuxAdam", type("MuonWithAuxAdam", (), {})
    )


def show(module: str) -> None:
    """Let a module that `prepare` hides be imported."""
    if sys.modules.get(module) is None:
        sys.modules.pop(module, None)
    if module == "bitsandbytes":  # reports at its import that it does without an optional package for CPUs
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
