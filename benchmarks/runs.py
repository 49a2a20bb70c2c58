"""What benchmarks of whole jobs share: one run by `grpo run`, and the vLLM server that TRL's trainer wants beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

LOG_CHARS = 3000  # of each log, where a job fails


class JobError(Exception):
    """A job did not end as it should; the text has the ends of its logs."""


def run_job(folder: Path, spec: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Run a GRPOJob below `folder` and return the metrics of its `steps` steps. Raises JobError."""
    manifest = folder / "job.yaml"
    head = {"apiVersion": "training.grpo.dev/v1alpha1", "kind": "GRPOJob", "metadata": {"name": "bench"}}
    manifest.write_text(yaml.safe_dump(head | {"spec": spec}))
    command = [sys.executable, "-m", "grpo_cli", "run", str(manifest), "--output", str(folder / "run")]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    files = folder.glob("run/*/data/*/*/*/metrics.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    if done.returncode or len(rows) != steps:
        logs = [f"--- {log}\n{log.read_text()[-LOG_CHARS:]}" for log in folder.glob("run/*/pods/*/*.log")]
        raise JobError("\n".join([*logs, f"the job ended with {done.returncode} after {len(rows)} steps"]))
    return rows


def start_trl_server(model: str, *, port: int, context: int, cache_bytes: int, device: str, log: Path, share: float = 0.9) -> Any:
    """The process of a server as `trl vllm-serve` starts it, but for the size of the cache, in a session of its own."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(context), "--enforce-eager", "--kv-cache-memory-bytes", str(cache_bytes)]
    command += ["--gpu-memory-utilization", str(share), "--weight-transfer-config", '{"backend": "nccl"}']
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": device, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as file:
        return subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
