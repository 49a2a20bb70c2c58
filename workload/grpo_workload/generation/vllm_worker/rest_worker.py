"""vLLM's worker of a colocated engine whose KV cache takes what the trainer leaves of the GPU."""

from __future__ import annotations

import logging

from vllm.v1.worker.gpu_worker import Worker

from grpo_workload.generation.cache_rest import GIB, cache_size, num_sequences

logger = logging.getLogger(__name__)


class RestWorker(Worker):  # type: ignore[misc]  # vLLM is untyped here
    """Worker whose cache is rounded, and not larger than what all sequences at once need."""

    def determine_available_memory(self) -> int:
        """Return the bytes of the cache; vLLM takes the least of all ranks."""
        left, sequences = super().determine_available_memory(), num_sequences(self.vllm_config)
        size = cache_size(left, self.vllm_config, self.get_kv_cache_spec(), sequences)
        what = "the KV cache takes %.2f GiB of %.2f that the trainer and the engine leave; most sequences at once: %d"
        logger.info(what, size / GIB, left / GIB, sequences)
        return size
