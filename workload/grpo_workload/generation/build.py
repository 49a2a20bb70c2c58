"""Builds a job's generator: the only place that chooses between them."""

from __future__ import annotations

from typing import Any

import torch

from grpo_spec.contract import Contract, Device
from grpo_spec.errors import ConfigError
from grpo_spec.generation import Topology
from grpo_workload.generation.base import Generator
from grpo_workload.generation.cache_rest import Rest, sequences_of_engine
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.plain_generate import TransformersGenerator
from grpo_workload.generation.servers.generator import ServerGenerator
from grpo_workload.policy.step.policy import Policy
from grpo_workload.policy.trials.engine_room import engine_room


def build_generator(
    contract: Contract, rank: int, policy: Policy, tokenizer: Any, episodes: Episodes | None = None
) -> Generator:
    """Return the generator that `generation.topology` and `generation.engine` ask for; collective.

    `episodes` plays those of a job with tools or environments; None for other jobs.

    Raises:
        ConfigError: names the field that is wrong.
    """
    config = contract.config
    match config.generation.topology, config.generation.engine:
        case Topology.COLOCATE, "vLLM":
            # Imported here because it loads vLLM, which takes seconds and is not installed everywhere.
            from grpo_workload.generation.colocate import ColocateGenerator

            return ColocateGenerator(config, contract.device, episodes, rest=_rest(contract, policy))
        case Topology.COLOCATE, "Transformers":
            return TransformersGenerator(config.model, config.training, policy, tokenizer)
        case Topology.SERVER | Topology.NODE_LOCAL, "vLLM":
            return ServerGenerator(contract, rank, policy.weights, episodes=episodes)
    raise ConfigError(f"generation.engine: {config.generation.engine} works only with topology Colocate")


def _rest(contract: Contract, policy: Policy) -> Rest | None:
    """Return what a colocated engine may take of the GPU, where no setting says it; collective."""
    generation = contract.config.generation
    if contract.device is not Device.CUDA or not generation.takes_rest:
        return None
    room = engine_room(policy, is_split=generation.is_split_over_ranks)
    return Rest(room, torch.cuda.mem_get_info()[1], sequences_of_engine(contract))
