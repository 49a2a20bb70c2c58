"""The size of a KV cache that takes what a colocated trainer leaves of the GPU, but no more than a job can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_spec.contract import Contract

GIB = 2**30
GRAIN = 2**27
"""Caches are multiples of it, so that a job that begins again under like conditions has one of the same size."""
_UNKNOWN = 1_000_000
"""Prompts of an evaluation of a whole dataset: more than vLLM samples at once."""
_SEQUENCES = "grpo_sequences"  # vLLM hands `additional_config` to its workers as it is


class Rest(NamedTuple):
    """The memory of a GPU that a colocated engine may take."""

    bytes: int  # for its weights, its cache and its own peak
    total: int  # bytes of the GPU
    sequences: int  # that it samples at once, at most

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments. Its share counts from what is in use when it starts, whoever uses it."""
        return {
            "gpu_memory_utilization": max(0, self.bytes) / self.total,
            "worker_cls": "grpo_workload.generation.vllm_worker.rest_worker.RestWorker",
            "additional_config": {_SEQUENCES: self.sequences},
        }


def sequences_of_engine(contract: Contract) -> int:
    """Return how many sequences a colocated engine samples at once, of a generation or of an evaluation.

    Those of its ranks: of all batches of a generation, or of all steps in flight.
    """
    training, evaluation = contract.config.training, contract.config.evaluation

    def of_ranks(prompts: int, generations: int) -> int:
        return contract.config.generation.tensor_parallel * -(-prompts // contract.world_size) * generations

    batches = training.steps_per_generation + training.max_staleness
    most = batches * of_ranks(training.prompts_per_step, training.num_generations)
    if evaluation is None:
        return most
    return max(most, of_ranks(evaluation.max_prompts or _UNKNOWN, evaluation.num_generations))


def num_sequences(vllm_config: Any) -> int:
    """Return how many of these sequences vLLM samples at once."""
    most: int = vllm_config.scheduler_config.max_num_seqs
    of_steps: int = vllm_config.additional_config.get(_SEQUENCES, most)
    return min(most, of_steps)


def cache_size(left: int, vllm_config: Any, layers: Mapping[str, Any], sequences: int) -> int:
    """Return bytes of a cache: those that are left, or fewer if `sequences` of the longest need no more.

    Layers of several kinds share blocks in a way that only vLLM knows, so there is no cap for them.
    """
    size: int = left // GRAIN * GRAIN
    if len({type(layer) for layer in layers.values()}) != 1:
        return size
    longest: int = sum(layer.max_memory_usage_bytes(vllm_config) for layer in layers.values())
    return min(size, (sequences + 1) * longest)  # one more: vLLM keeps a block for itself
