"""Which generator a job has: the one place where it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from grpo_workload.attention_heads import check_heads
from grpo_workload.config import Topology
from grpo_workload.contract import Contract, Device
from grpo_workload.generation.base import Generator
from grpo_workload.generation.memory import check_room, num_parameters

if TYPE_CHECKING:
    from grpo_workload.engine import Policy


def build_generator(contract: Contract, rank: int, policy: Policy, tokenizer: Any) -> Generator:
    """The generator that `generation.topology` and `generation.engine` ask for; collective. ValueError names the field that is wrong."""
    config = contract.config
    match config.generation.topology, config.generation.engine:
        case Topology.COLOCATE, "vLLM":
            from grpo_workload.generation.colocate import ColocateGenerator

            check_heads("generation.tensorParallel", config.generation.tensor_parallel, policy.module.config.to_dict())
            if contract.device is Device.CUDA:
                _, total = torch.cuda.mem_get_info()
                adapted = num_parameters(policy.adapters.trained()) if policy.adapters else None
                own = num_parameters(policy.module.parameters()) - (adapted or 0)
                check_room(config, total=total, num_parameters=own, world_size=contract.world_size, num_adapted=adapted)
            return ColocateGenerator(config, contract.device)
        case Topology.COLOCATE, "Transformers":
            from grpo_workload.generation.transformers import TransformersGenerator

            return TransformersGenerator(config.training, policy, tokenizer)
        case Topology.SERVER | Topology.NODE_LOCAL, "vLLM":
            from grpo_workload.generation.server import ServerGenerator

            return ServerGenerator(contract, rank, policy.weights)
    raise ValueError(f"generation.engine: {config.generation.engine} works with topology Colocate alone")
