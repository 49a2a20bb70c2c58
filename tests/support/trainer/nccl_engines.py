"""vLLM servers on the second and later GPUs; this process pushes weights to them over NCCL from the first GPU.

With too few GPUs, some share one. NCCL refuses two ranks on one GPU of a host, so each process then calls itself a
host of its own (NCCL_HOSTID): what is sent goes through sockets, slowly, and the protocol around it is the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_spec.contract import Contract, Device
from grpo_spec.lora import LoraConfig
from grpo_workload.generation.servers.engine_watch import Timing
from grpo_workload.generation.servers.generator import ServerGenerator
from support.trainer.engines import Engines, make_contract, own_generator, prompts, weights_of
from support.trainer.random_llama import mean_difference

BF16_ERROR = 0.1  # nats for each token between two implementations of a random 24-layer model; 0.059 was measured


@contextmanager
def serving(
    model: Any, folder: Path, num_engines: int, *, restarts: bool = False, lora: LoraConfig | None = None
) -> Iterator[tuple[ServerGenerator, Engines]]:
    """Run engines on the second and later GPUs; yield the generator of one rank on the first GPU, and the engines."""
    count = torch.cuda.device_count()
    visible = [int(number) for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number] or range(
        count
    )
    sizes = [(1, 1)] * num_engines
    settings: dict[str, Any] = {"kvCacheMemory": "2Gi", "gpuMemoryUtilization": 0.3}
    contract = make_contract(Path(model.name_or_path), sizes, timeout=200, restarts=restarts, **settings)
    raw = contract.model_dump(mode="json", by_alias=True)
    raw["device"] = Device.CUDA
    for index, engine in enumerate(raw["engines"]):
        engine["devices"] = [visible[(1 + index) % count]]
    raw["config"]["model"]["dtype"] = "bfloat16"
    raw["config"]["lora"] = None if lora is None else lora.model_dump(by_alias=True)
    with ExitStack() as stack:
        shares = count <= num_engines
        pods = Engines(folder, Contract.model_validate(raw), each_a_host=shares)
        if shares:
            stack.enter_context(pytest.MonkeyPatch.context()).setenv("NCCL_HOSTID", "trainer")
        stack.enter_context(pods.running())
        torch.cuda.set_device(0)
        generator = own_generator(pods.contract, lambda: weights_of(model), folder, Timing(poll=0.5, lost=5))
        yield stack.enter_context(generator), pods


def difference(model: Any, generator: ServerGenerator) -> float:
    """Return the mean difference of log-probabilities over eight completions of each prompt."""
    return mean_difference(model, generator, prompts(), 8)
