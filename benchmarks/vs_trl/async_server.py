"""vLLM's server for TRL's AsyncGRPOTrainer, on the second GPU."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common.busy import gpu_number
from benchmarks.generation.staleness import ENGINES
from grpo_workload.pod.vllm_command import SERVER, as_flags


def import_path(first: str | None = None) -> str:
    """Return a PYTHONPATH with this repository, and with another folder before it."""
    return os.pathsep.join(filter(None, [first, str(ROOT), os.environ.get("PYTHONPATH")]))


def serve(
    model: Path, port: int, device: str, folder: Path, imposed: Mapping[str, str], context: int | None = None
) -> None:
    """Start the vLLM server, with the engine arguments of our rows; nobody waits for it here.

    `imposed` are the variables of a plugin, `context` is the longest sequence if it is not that of our rows.
    """
    engine = ENGINES[device]
    arguments: dict[str, Any] = {
        "model": str(model),
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "max_model_len": context or engine["maxModelLen"],
        "logprobs_mode": "processed_logprobs",
        "uvicorn_log_level": "warning",
    }
    if device == "cuda":
        arguments |= {"gpu_memory_utilization": 0.6, "weight_transfer_config": {"backend": "nccl"}}
    else:
        arguments |= {"kv_cache_memory_bytes": 2**28}
    variables = {**imposed, "PYTHONPATH": import_path(imposed["PYTHONPATH"])}
    variables |= {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": gpu_number(1)}
    with (folder / "engine.log").open("w") as log:
        subprocess.Popen(
            [*SERVER, *as_flags(arguments | engine["engineArgs"])], env=os.environ | variables, stdout=log, stderr=log
        )


def wait_for(port: int) -> None:
    """Wait until the server answers."""
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
