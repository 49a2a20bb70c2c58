"""Samples prompts of later steps along with those of the current one, on the vLLM engine inside a rank.

While some completions of a step are longer than others, the engine works on prompts of the next steps. Once the step is
complete, the engine drops the unfinished ones, since its memory is needed for training. They keep their tokens, and the
next step continues them under its own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation.base import Listener
from grpo_workload.generation.begun import Begun, PromptKey
from grpo_workload.generation.own_answers import bare
from grpo_workload.generation.vllm_api import token_prompt, whole_text

Gather = Callable[[list[Any]], list[list[Any]]]


class AheadSampler:
    """Prompts that one rank has begun on its engine. Methods are collective among the ranks that share the engine."""

    def __init__(self, llm: Any, sampling: Mapping[str, Any], gather: Gather, place: int) -> None:
        """Begin nothing yet.

        Args:
            llm: vLLM's `LLM`.
            sampling: a request's parameters, as `vllm_api.sampling_parameters` returns them.
            gather: returns the lists of all ranks that share the engine, in rank order; collective among them.
            place: place of this rank among them.
        """
        self._llm, self._sampling, self._gather, self._place = llm, sampling, gather, place
        self._tokenizer = llm.get_tokenizer()
        self._begun = Begun(sampling["max_tokens"])
        self._waiting: dict[PromptKey, tuple[Listener, int]] = {}  # this rank's, with their positions
        self._done: dict[PromptKey, list[Completion]] = {}  # this rank's

    def begin(self, prompts: Sequence[Prompt], num_generations: int, listener: Listener) -> None:
        """See `Generator.begin`. The engine first sees the prompts in the next `generate`."""
        self._add(prompts, num_generations, listener)

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, listener: Listener, version: int
    ) -> list[list[Completion]]:
        """See `Generator.generate`; the engine has weights of `version`."""
        shares = self._add(prompts, num_generations, listener)
        together = [key for share in shares for key in share]
        if unfinished := self._begun.unfinished(together):
            self._sample(together, unfinished, listener, version)
        self._begun.drop(together)
        own = shares[self._place]
        groups = [self._done[key] for key in own]
        for key in set(own):
            del self._done[key]
        return groups

    def _add(self, prompts: Sequence[Prompt], num_generations: int, listener: Listener) -> list[list[PromptKey]]:
        """Begin the prompts of all ranks that share the engine; return them by rank."""
        shares = self._gather([(self._place, prompt.index, prompt.seed, prompt.token_ids) for prompt in prompts])
        self._begun.begin([key for share in shares for key in share], num_generations)
        for position, key in enumerate(shares[self._place]):
            if key not in self._done:
                self._waiting.setdefault(key, (listener, position))
        return shares

    def _sample(
        self, together: Sequence[PromptKey], unfinished: set[PromptKey], listener: Listener, version: int
    ) -> None:
        """Run the engine until all of `unfinished` are complete, which are prompts of the current step, `together`."""
        engine = self._llm.llm_engine
        for request in self._begun.ask(first=together):
            own = {"seed": request.seed, "max_tokens": request.max_tokens} | bare(self._sampling)
            parameters = SamplingParams(output_kind=RequestOutputKind.DELTA, **(dict(self._sampling) | own))
            engine.add_request(request.name, token_prompt(request.token_ids), parameters)
        while unfinished:
            outputs = engine.step()
            listener.moved()
            for output in outputs:
                if (key := self._take(output, version)) is not None:
                    unfinished.discard(key)
                    self._finish(key)
        engine.abort_request(self._begun.cut())
        # Batches that were scheduled before: the engine must not write into memory that it gives up next.
        for _ in range(engine.vllm_config.max_concurrent_batches):
            engine.step()

    def _take(self, output: Any, version: int) -> PromptKey | None:
        """Keep what a step of the engine sampled for one request; return its prompt if that is complete now."""
        (answer,) = output.outputs
        assert answer.finish_reason in (None, "stop", "length"), answer.finish_reason
        tokens = list(answer.token_ids)
        logprobs = answer.logprobs.logprobs if tokens else []
        assert not tokens or answer.logprobs.token_ids == tokens, "there are log-probabilities of other tokens"
        return self._begun.add(output.request_id, tokens, logprobs, version, answer.finish_reason)

    def _finish(self, key: PromptKey) -> None:
        """Keep the completions of a prompt and tell its listener, if it is one of this rank."""
        if key not in self._waiting:
            return
        listener, position = self._waiting.pop(key)
        _, _, _, prompt_ids = key
        self._done[key] = [
            draft.complete(
                whole_text(self._tokenizer, prompt_ids, draft.token_ids, is_stopped=draft.finish_reason == "stop")
            )
            for draft in self._begun.drafts(key)
        ]
        listener.finished(position, self._done[key])
