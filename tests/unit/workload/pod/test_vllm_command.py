"""Asserts the arguments and variables of vLLM servers, which arguments are refused, and what backends are given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from grpo_spec.contract import Contract, Follower
from grpo_spec.errors import ConfigError
from grpo_spec.inputs import ModelConfig
from grpo_spec.training import TrainingConfig
from grpo_workload.generation import vllm_api
from grpo_workload.pod.meeting import Node
from grpo_workload.pod.vllm_command import FOLLOWER, SERVER, as_flags, engine_command
from support.trainer.places import contract_json


def contract(device: str = "cuda", **generation: Any) -> Contract:
    common = {"pod": "pod-0", "group": "g", "host": "h", "dataParallel": 2}
    engines = [
        common | {"name": f"engine-{index}", "port": 8000 + index, "tensorParallel": size, "devices": [*devices]}
        for index, size, devices in ((0, 1, range(2)), (1, 2, range(2, 6)))
    ]
    config = {"model": {"name": "org/model", "revision": "abc"}, "generation": {"topology": "Server", **generation}}
    transfers = [{"sender": 0, "host": "h", "port": 9000}]
    return Contract.model_validate(contract_json(config, device=device, engines=engines, transfers=transfers))


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_an_engine_gets_its_parallel_sizes_model_port_and_devices() -> None:
    job = contract(maxModelLen=4096)
    command, environ = engine_command(job, job.engines[1], {"RANK": "3", "MASTER_ADDR": "x", "HOME": "/root"})

    flags = {"--tensor-parallel-size": "2", "--data-parallel-size": "2", "--model": "org/model", "--revision": "abc"}
    flags |= {"--max-model-len": "4096", "--port": "8001", "--weight-transfer-config": '{"backend": "watched_nccl"}'}
    assert {flag: value(command, flag) for flag in flags} == flags
    variables = {"CUDA_VISIBLE_DEVICES": "2,3,4,5", "VLLM_SERVER_DEV_MODE": "1", "HOME": "/root"}
    assert environ.items() >= variables.items()
    assert not {"RANK", "MASTER_ADDR"} & environ.keys()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_pod_of_an_engine_over_pods_starts_its_part_of_it(device: str) -> None:
    job = contract(device)
    followers = (Follower(pod="pod-1", port=8100), Follower(pod="pod-2", port=8200))
    sizes = {"tensor_parallel": 2, "data_parallel": 1, "pipeline_parallel": 3, "devices": (0, 1)}
    engine = job.engines[0].model_copy(update={"followers": followers, **sizes})
    job = job.model_copy(update={"engines": (engine,)})
    assert (engine.world_size, engine.pods) == (6, ("pod-0", "pod-1", "pod-2"))
    first, environ = engine_command(job, engine, {}, node=Node(0, 4711))
    third, _ = engine_command(job, engine, {}, node=Node(2, 4711))
    for command in (first, third):
        flags = ("--tensor-parallel-size", "--pipeline-parallel-size", "--nnodes", "--master-addr", "--master-port")
        assert [value(command, flag) for flag in flags] == ["2", "3", "3", "h", "4711"]
        assert ("--worker-cls" in command) == (device == "cpu")
    assert [value(one, "--node-rank") for one in (first, third)] == ["0", "2"]
    assert [value(one, "--port") for one in (first, third)] == ["8000", "8200"]
    assert (tuple(first[:3]), tuple(third[:3])) == (SERVER, FOLLOWER)
    if device == "cuda":
        assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    else:
        assert int(environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    job = contract()
    config = job.config.model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    engine = job.engines[0].model_copy(update={"pipeline_parallel": 3})
    with pytest.raises(ConfigError, match=r"podsPerEngine of group g: the model's 2 layers .* 3 pipeline stages"):
        engine_command(job.model_copy(update={"config": config}), engine, {}, node=Node(0, 1))


def test_engines_return_the_experts_that_they_choose_if_routers_are_replayed() -> None:
    job = contract()
    training = job.config.training.model_copy(update={"router_replay": True})
    replayed = job.model_copy(update={"config": job.config.model_copy(update={"training": training})})
    assert "--enable-return-routed-experts" in engine_command(replayed, job.engines[0], {})[0]
    assert not [flag for flag in engine_command(job, job.engines[0], {})[0] if "routed" in flag]


def test_each_start_serves_the_model_under_another_name() -> None:
    job = contract()
    names = {value(engine_command(job, job.engines[0], {})[0], "--served-model-name") for _ in range(3)}
    assert len(names) == 3


def test_the_kv_cache_is_sized_in_bytes_or_as_a_share_of_the_gpu() -> None:
    by_share, _ = engine_command(contract(), contract().engines[0], {})
    in_bytes, _ = engine_command(contract(kvCacheMemory="4Gi"), contract().engines[0], {})
    own, _ = engine_command(contract(gpuMemoryUtilization=0.5), contract().engines[0], {})
    assert value(by_share, "--gpu-memory-utilization") == "0.9"
    assert value(in_bytes, "--kv-cache-memory-bytes") == str(4 * 2**30)
    assert value(in_bytes, "--gpu-memory-utilization") == "0.9", "vLLM checks what is free by it"
    assert value(own, "--gpu-memory-utilization") == "0.5"


def test_engines_on_cpus_share_the_cores() -> None:
    job = contract("cpu")
    command, environ = engine_command(job, job.engines[0], {})
    assert value(command, "--weight-transfer-config") == '{"backend": "gloo"}'
    assert "--no-enable-chunked-prefill" in command
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(environ["OMP_NUM_THREADS"]) >= 1
    assert "CUDA_VISIBLE_DEVICES" not in environ


@pytest.mark.parametrize("name", ["port", "tensor_parallel_size", "weight-transfer-config", "gpu_memory_utilization"])
def test_arguments_that_the_trainer_sets_are_refused(name: str) -> None:
    job = contract(engineArgs={name: 1})
    with pytest.raises(ValueError, match=rf"generation.engineArgs: {name.replace('-', '_')} cannot be set"):
        engine_command(job, job.engines[0], {})


@pytest.mark.parametrize("name", ["logits_processors", "override_generation_config", "watermark-config"])
def test_arguments_that_change_the_distribution_are_refused(name: str) -> None:
    job = contract(engineArgs={name: ["x"]})
    with pytest.raises(ValueError, match=r"cannot be set: .* training.temperature, topP, topK, minP and penalties w"):
        engine_command(job, job.engines[0], {})


def test_a_request_has_the_jobs_settings_and_switches_off_what_a_generation_config_may_switch_on() -> None:
    settings = {"temperature": 0.6, "top_p": 0.7, "top_k": 20, "min_p": 0.1}
    none = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    some = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3}
    for given, penalties in ({}, none), (some, some):
        sampling = vllm_api.sampling_parameters(TrainingConfig(**settings, **given))
        assert sampling == {"skip_special_tokens": True, "max_tokens": 256, **settings, **penalties}


def test_a_model_that_cannot_be_split_over_the_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 9}')
    job = contract()
    job = job.model_copy(update={"config": job.config.model_copy(update={"model": ModelConfig(path=str(tmp_path))})})
    engine_command(job, job.engines[0], {})
    said = r"generation\.tensorParallel of engine engine-1: the model's 9 attention heads .* 2 GPUs; 1 would work"
    with pytest.raises(ValueError, match=said):
        engine_command(job, job.engines[1], {})


def test_arguments_become_flags() -> None:
    arguments: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 8, "seed": None}
    assert as_flags(arguments) == ["--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", "8"]
    assert as_flags({"a": {"b": [1]}, "c": [1, "x"]}) == ["--a", '{"b": [1]}', "--c", "1", "x"]
