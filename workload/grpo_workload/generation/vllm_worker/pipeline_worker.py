"""vLLM's worker of an engine on CPUs whose layers are divided over several pods."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineWorker(CPUWorker):  # type: ignore[misc]  # vLLM is untyped here
    """Worker that has, from the start, the buffers in which a later stage of the pipeline gets what it goes on from.

    vLLM 0.32 makes them as it warms up. On CPUs it does so only for engines that compile, and the first request of
    others would fail.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and make the buffers."""
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
