"""What the training loop needs of whoever samples completions, and the one place where it is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from grpo_workload.attention_heads import check_heads
from grpo_workload.config import Topology
from grpo_workload.contract import Contract, Device
from grpo_workload.generation.memory import check_room, num_parameters
from grpo_workload.types import Completion, Prompt

if TYPE_CHECKING:
    from grpo_workload.engine import Policy

Weights = Iterable[tuple[str, Tensor]]


class Generator(Protocol):
    """Samples completions with the policy's weights. Every rank has one, and calls the same methods in the same order."""

    def generate(self, prompts: Sequence[Prompt], num_generations: int) -> list[list[Completion]]:
        """`num_generations` completions of each of this rank's prompts, in the order of the prompts; a rank may have none.

        A prompt's completions depend on its seed and the weights, up to rounding: not on the prompts beside it, nor on the ranks.
        """
        ...

    def sleep(self) -> None:
        """Give memory back until weights come; between `generate` and `sync_weights`."""
        ...

    def sync_weights(self, weights: Weights, version: int) -> None:
        """Take over all of `weights`, in the checkpoint's names; completions carry `version` from here on."""
        ...

    def blame(self, error: Exception) -> Exception:
        """What is to blame for an error of the loop: an engine that failed, else the error itself."""
        ...

    def close(self) -> None:
        """End it; collective. The process group is unusable afterwards: no collective may follow."""
        ...


def build_generator(contract: Contract, rank: int, policy: Policy, tokenizer: Any) -> Generator:
    """The generator that `generation.topology` and `generation.engine` ask for; collective. ValueError names the field that is wrong."""
    config = contract.config
    match config.generation.topology, config.generation.engine:
        case Topology.COLOCATE, "vLLM":
            from grpo_workload.generation.colocate import ColocateGenerator

            check_heads("generation.tensorParallel", config.generation.tensor_parallel, policy.module.config.to_dict())
            if contract.device is Device.CUDA:
                _, total = torch.cuda.mem_get_info()
                check_room(config, total=total, num_parameters=num_parameters(policy.module), world_size=contract.world_size)
            return ColocateGenerator(config, contract.device)
        case Topology.COLOCATE, "Transformers":
            from grpo_workload.generation.transformers import TransformersGenerator

            return TransformersGenerator(config.training, policy, tokenizer)
        case Topology.SERVER | Topology.NODE_LOCAL, "vLLM":
            from grpo_workload.generation.server import ServerGenerator

            return ServerGenerator(contract, rank, policy.weights)
    raise ValueError(f"generation.engine: {config.generation.engine} works with topology Colocate alone")
