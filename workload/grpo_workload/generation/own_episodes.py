"""Episodes on the vLLM engine inside a rank.

Episodes run in a thread of their own and ask for turns; the rank's main thread runs the engine, which takes up turns as
they come. So an episode that waits for a tool is not asked, and no other waits for it. Ranks that share an engine tell
each other of new turns before each of its steps, so that all give it the same requests.

With `training.maxStaleness`, episodes of later steps are played along. What the engine has not finished when a step is
complete is cut, keeps its tokens, and goes on in the next step under its weights.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation.base import Listener
from grpo_workload.generation.episode_draft import Ask, Turn
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.own_answers import bare
from grpo_workload.generation.vllm_api import token_prompt
from grpo_workload.ranks.loop_thread import LoopThread
from grpo_workload.ranks.seeds import sample_seed

Gather = Callable[[list[Any]], list[list[Any]]]
Key = tuple[int, int]
"""A prompt's row and seed."""

IDLE_SECONDS = 0.02
"""Time that the engine's thread waits for a turn while all episodes are in calls."""


@dataclass(slots=True)
class _Request:
    """A turn that an episode waits for, as far as it has been sampled."""

    ask: Ask
    answer: Future[Turn]
    turn: Turn = field(default_factory=Turn)

    def description(self) -> tuple[list[int], int, int]:
        """Return what the engine is asked: tokens, seed and the most tokens to add."""
        done = len(self.turn.token_ids)
        seed = sample_seed(self.ask.seed, self.ask.number, self.ask.num_tokens + done)
        return [*self.ask.token_ids, *self.turn.token_ids], seed, self.ask.max_tokens - done


class OwnEpisodes:
    """Episodes that one rank has begun on its engine. Methods are collective among the ranks that share the engine."""

    def __init__(
        self,
        thread: LoopThread,
        llm: Any,
        sampling: Mapping[str, Any],
        gather: Gather,
        place: int,
        episodes: Episodes,
        **cache: str,
    ) -> None:
        """Begin nothing yet.

        Args:
            thread: where all episodes of the rank run.
            llm: vLLM's `LLM`.
            sampling: a request's parameters, as `vllm_api.sampling_parameters` returns them.
            gather: returns the lists of all ranks that share the engine, in rank order; collective among them.
            place: place of this rank among them.
            episodes: plays them.
            cache: further fields of each prompt.
        """
        self._llm, self._sampling, self._gather, self._place = llm, sampling, gather, place
        self._episodes, self._cache = episodes, cache
        self._thread = thread
        self._fresh: queue.SimpleQueue[_Request] = queue.SimpleQueue()  # turns that the engine has not seen
        self._cut: list[_Request] = []  # turns that were cut
        self._plays: dict[Key, Future[list[Completion]]] = {}
        self._listeners: dict[Key, tuple[Listener, int]] = {}  # of unfinished prompts, with their positions
        self._version = self._count = 0

    def begin(self, prompts: Sequence[Prompt], num_generations: int, listener: Listener) -> None:
        """See `Generator.begin`. Environments begin at once; the engine sees the first turns in the next `generate`."""
        for position, prompt in enumerate(prompts):
            if (key := _key(prompt)) in self._plays:
                continue
            work = self._episodes.play_group(prompt, num_generations, self._sample, listener.moved, self._now)
            self._listeners[key] = listener, position
            self._plays[key] = self._thread.submit(work)

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, listener: Listener, version: int
    ) -> list[list[Completion]]:
        """See `Generator.generate`; the engine has weights of `version`."""
        self._version = version
        self.begin(prompts, num_generations, listener)
        self._run([_key(prompt) for prompt in prompts], listener)
        return [self._plays.pop(_key(prompt)).result() for prompt in prompts]

    def _now(self) -> int:
        return self._version

    async def _sample(self, ask: Ask) -> Turn:
        request = _Request(ask, Future())
        request.answer.set_running_or_notify_cancel()  # the engine answers also an episode that was given up
        self._fresh.put(request)
        return await asyncio.wrap_future(request.answer)

    def _run(self, wanted: Sequence[Key], listener: Listener) -> None:
        """Run the engine until the prompts of all ranks that share it are complete."""
        engine, running = self._llm.llm_engine, dict[str, _Request | None]()  # None: another rank's
        while True:
            own = self._take(wait=not engine.has_unfinished_requests())
            is_done = self._tell(wanted)
            shares = self._gather([([one.description() for one in own], is_done, self._failure(wanted) is not None)])
            for place, ((asked, _, _),) in enumerate(shares):
                for number, (token_ids, seed, max_tokens) in enumerate(asked):
                    self._count += 1
                    name = f"turn-{self._count}"
                    running[name] = own[number] if place == self._place else None
                    self._add(name, token_ids, seed, max_tokens)
            if any(failed for ((_, _, failed),) in shares):
                raise self._failure(wanted) or RuntimeError("an episode of a rank that shares the engine has failed")
            if all(done for ((_, done, _),) in shares):
                break
            if engine.has_unfinished_requests():
                for output in engine.step():
                    self._keep(running, output)
                listener.moved()
        self._stop(engine, running)

    def _take(self, *, wait: bool) -> list[_Request]:
        """Return the turns that the engine has not got yet; with `wait`, after a moment if there is none."""
        found, self._cut = self._cut, []
        try:
            while True:
                found.append(self._fresh.get(timeout=IDLE_SECONDS) if wait and not found else self._fresh.get_nowait())
        except queue.Empty:
            return found

    def _add(self, name: str, token_ids: list[int], seed: int, max_tokens: int) -> None:
        own = {"seed": seed, "max_tokens": max_tokens} | bare(self._sampling)
        parameters = SamplingParams(output_kind=RequestOutputKind.DELTA, **(dict(self._sampling) | own))
        self._llm.llm_engine.add_request(name, token_prompt(token_ids) | self._cache, parameters)

    def _keep(self, running: dict[str, _Request | None], output: Any) -> None:
        """Keep what a step of the engine has sampled of a turn; an episode that waits for it goes on when it ends."""
        (answer,) = output.outputs
        assert answer.finish_reason in (None, "stop", "length"), answer.finish_reason
        request = running[output.request_id]
        if answer.finish_reason is not None:
            del running[output.request_id]
        if request is None:
            return
        turn, tokens = request.turn, list(answer.token_ids)
        if tokens:
            assert answer.logprobs.token_ids == tokens, "there are log-probabilities of other tokens"
            turn.token_ids += tokens
            turn.logprobs += answer.logprobs.logprobs
            if self._version not in turn.versions[-1:]:
                turn.versions.append(self._version)
        if answer.finish_reason is not None:
            turn.finish_reason = answer.finish_reason
            request.answer.set_result(turn)

    def _tell(self, wanted: Sequence[Key]) -> bool:
        """Tell listeners of prompts that are complete; returns whether all of `wanted` are."""
        for key in [key for key in self._listeners if self._plays[key].done()]:
            listener, position = self._listeners.pop(key)
            if self._plays[key].exception() is None:
                listener.finished(position, self._plays[key].result())
        return all(self._plays[key].done() for key in wanted)

    def _failure(self, wanted: Sequence[Key]) -> BaseException | None:
        ended = [self._plays[key] for key in wanted if self._plays[key].done()]
        return next((error for one in ended if (error := one.exception()) is not None), None)

    def _stop(self, engine: Any, running: Mapping[str, _Request | None]) -> None:
        """Cut what the engine has not finished."""
        engine.abort_request(list(running))
        # Batches that were scheduled before: the engine must not write into memory that it gives up next.
        for _ in range(engine.vllm_config.max_concurrent_batches):
            engine.step()
        self._cut += [request for request in running.values() if request is not None]


def _key(prompt: Prompt) -> Key:
    return prompt.index, prompt.seed
