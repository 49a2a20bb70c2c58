"""Spares vLLM's HTTP server the work on log-probabilities that the trainer does not read.

For each sampled token, vLLM decodes the token by itself and makes a dictionary and an object, in the one process that
also answers the requests of a push. With hundreds of completions in flight that takes as long as a step of the engine.
Requests with `vllm_api.BARE` get the same numbers without strings; others stay as they are.
"""

from __future__ import annotations

from typing import Any

from grpo_workload.generation.vllm_api import BARE_LOGPROBS


def register() -> None:
    """Change vLLM's class for log-probabilities; vLLM calls this in each of its processes, in some more than once."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    plain: Any = LogprobsProcessor.from_new_request.__func__
    if plain.__module__ == __name__:
        return

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        processor = plain(cls, tokenizer, request)
        if BARE_LOGPROBS in (request.sampling_params.extra_args or {}) and processor.logprobs is not None:
            processor.tokenizer, processor.logprobs = None, FlatLogprobs()
        return processor

    LogprobsProcessor.from_new_request = classmethod(from_new_request)
