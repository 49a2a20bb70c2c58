"""Requests to the vLLM inside a rank, besides how to sample, and completions made of its answers.

By itself vLLM decodes each sampled token twice, for the text and next to its log-probability, and keeps an object and a
dictionary for it. Meanwhile the GPU waits for the next step. So the text is made once, of the whole completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_workload.algorithm.samples import Completion
from grpo_workload.generation.vllm_api import whole_text


def bare(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return further parameters of a request: the sampled tokens' log-probabilities, and text only where it may end it.

    Args:
        sampling: the other parameters, as `vllm_api.sampling_parameters` returns them.
    """
    return {"logprobs": 0, "flat_logprobs": True, "detokenize": "stop" in sampling}


class Completions:
    """Completions of one call of `LLM.generate` with parameters of `bare`, each made once."""

    def __init__(self, tokenizer: Any, weight_version: int) -> None:
        self._tokenizer, self._weight_version = tokenizer, weight_version
        self._made: dict[int, tuple[Any, Completion]] = {}  # by the ids of vLLM's objects, which are kept for that

    def of(self, output: Any) -> list[Completion]:
        """Return the completions of a request of which all are finished."""
        return [self._completion(output.prompt_token_ids, answer) for answer in output.outputs]

    def _completion(self, prompt_ids: list[int], answer: Any) -> Completion:
        if id(answer) in self._made:
            return self._made[id(answer)][1]
        assert answer.finish_reason in ("stop", "length"), answer.finish_reason
        tokens, is_stopped = list(answer.token_ids), answer.finish_reason == "stop"
        assert answer.logprobs.token_ids == tokens, "there are other log-probabilities than those of sampled tokens"
        made = Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(answer.logprobs.logprobs),
            text=answer.text or whole_text(self._tokenizer, prompt_ids, tokens, is_stopped=is_stopped),
            finish_reason=answer.finish_reason,
            weight_version=self._weight_version,
            routed_experts=answer.routed_experts,
        )
        self._made[id(answer)] = answer, made
        return made
