"""Sends one rank's prompts to the engines that hold the current weights; when one is lost, to the remaining ones.

A prompt may be begun some steps before it is asked for: its request then goes on while ranks train and engines get new
weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from grpo_spec.contract import Contract
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation import vllm_api
from grpo_workload.generation.base import Listener
from grpo_workload.generation.episode_draft import Ask, Turn
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.errors import EngineError, RefusedError
from grpo_workload.generation.servers.http_client import EngineClient
from grpo_workload.generation.servers.roster import Processes
from grpo_workload.generation.servers.routing import Router
from grpo_workload.ranks.seeds import sample_seed

logger = logging.getLogger(__name__)


Key = tuple[int, int]
"""A prompt's row and seed: rows may repeat in a run, but each time with another seed."""


class Sampler:
    """Samples completions of one rank's prompts on its engines.

    Coroutines are for the link's thread.
    """

    def __init__(self, link: EngineLink, contract: Contract, rank: int, episodes: Episodes | None = None) -> None:
        self._link, self._episodes = link, episodes
        self._training = contract.config.training
        self._restarts = contract.restart_engines
        self._clients = {client.engine.name: client for client in link.clients}
        self._router = Router(first=rank, steps=self._training.max_staleness + 1)
        self._tasks: dict[Key, asyncio.Task[list[Completion]]] = {}
        self._version = 0
        self._open = asyncio.Event()  # cleared during a push: a turn that begins then would be of both weights
        self._open.set()
        self._failure: EngineError | None = None  # why an engine is not used

    async def hold(self) -> None:
        """Let no turn of an episode begin until `updated`; those that have begun go on."""
        self._open.clear()

    async def updated(self, version: int) -> None:
        """Note that engines have got weights of this version, perhaps in the middle of requests."""
        self._version = version
        self._open.set()

    def idle_seconds(self) -> float:
        """Return how long, since the last call, no engine had a request; from any thread."""
        return self._router.idle.take()

    async def begin(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        processes: Processes,
        version: int,
        listener: Listener,
        temperature: float | None = None,
    ) -> None:
        """Begin to sample the prompts that have not begun yet.

        Args:
            prompts: this rank's prompts.
            num_samples: number of completions of each prompt.
            processes: processes that hold the current weights, by engine.
            version: version of these weights.
            listener: is told of each prompt whose completions are there.
            temperature: of an evaluation; None for training.

        Raises:
            EngineError: an engine failed, and lost engines do not come back.
        """
        self._version = version
        fresh = [(place, prompt) for place, prompt in enumerate(prompts) if _key(prompt) not in self._tasks]
        if not fresh and not (prompts and self._router.deserted.is_set()):
            return  # what was begun before has its engines
        current = await self._up_to_date(version, processes)
        self._router.use({name: client.engine for name, client in current.items()}, processes)
        for position, prompt in fresh:
            work = self._group(prompt, position, num_samples, listener, temperature)
            self._tasks[_key(prompt)] = asyncio.get_running_loop().create_task(work)

    async def wait(self, prompts: Sequence[Prompt]) -> EngineError | None:
        """Wait for the completions of prompts that have begun.

        A prompt whose engine is lost is sampled again on another engine, with the same seed.

        Returns:
            None when all are there; else, if lost engines come back, why no engine remains.

        Raises:
            ValueError: an engine refuses a prompt.
            EngineError: an engine failed, and lost engines do not come back.
        """
        asked = [self._tasks[_key(prompt)] for prompt in prompts]
        deserted = asyncio.ensure_future(self._router.deserted.wait())
        try:
            while pending := [task for task in asked if not task.done()]:
                await asyncio.wait([*pending, deserted], return_when=asyncio.FIRST_COMPLETED)
                for task in asked:
                    if task.done():
                        task.result()  # raises its error
                if deserted.done():
                    assert self._failure is not None
                    return self._failure
        finally:
            deserted.cancel()
        return None

    def take(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Return the completions of prompts that `wait` has waited for."""
        return [self._tasks.pop(_key(prompt)).result() for prompt in prompts]

    async def _group(
        self, prompt: Prompt, position: int, num_samples: int, listener: Listener, temperature: float | None
    ) -> list[Completion]:
        if self._episodes is None:
            found = await self._complete(prompt, num_samples, prompt.seed, temperature)
        else:

            async def sample(ask: Ask) -> Turn:
                return await self._turn(prompt, ask, temperature)

            play = self._episodes.play_group
            found = await play(prompt, num_samples, sample, listener.moved, lambda: self._version)
        listener.finished(position, found)
        return found

    async def _turn(self, prompt: Prompt, ask: Ask, temperature: float | None) -> Turn:
        """Sample a turn of an episode; one whose engine is lost is sampled again, for the same tokens."""
        await self._open.wait()
        seed = sample_seed(ask.seed, ask.number, ask.num_tokens)
        whole = replace(prompt, token_ids=tuple(ask.token_ids))
        (found,) = await self._complete(whole, 1, seed, temperature, max_tokens=ask.max_tokens)
        return Turn(
            token_ids=list(found.token_ids),
            logprobs=list(found.logprobs),
            versions=list(dict.fromkeys((found.weight_version, found.weight_version + found.weight_updates))),
            finish_reason=found.finish_reason,
        )

    async def _complete(
        self, prompt: Prompt, num_samples: int, seed: int, temperature: float | None, **own: object
    ) -> list[Completion]:
        while True:
            lane = await self._router.acquire(num_samples)
            client, version = self._clients[lane.engine.name], self._version
            work = client.complete(
                prompt.token_ids,
                model=lane.process,
                num_samples=num_samples,
                sampling=self._parameters(seed, version, temperature) | own,
                version=version,
                images=prompt.images,
            )
            try:
                found = await self._link.watch.sample(client, lane.process, work)
            except RefusedError as error:
                raise ValueError(f"prompt {prompt.index} of the dataset: {error}") from error
            except EngineError as error:
                if not self._restarts:
                    raise
                logger.warning("sending prompt %d to another engine: %s", prompt.index, error)
                self._failure = error
                self._router.close(lane)
            else:
                return [replace(one, weight_updates=self._version - version) for one in found]
            finally:
                self._router.release(lane, num_samples)

    def _parameters(self, seed: int, version: int, temperature: float | None) -> dict[str, object]:
        parameters = vllm_api.sampling_parameters(self._training) | {"seed": seed}
        if temperature is not None:
            return parameters | {"temperature": temperature, "cache_salt": f"{vllm_api.EVALUATION} {version}"}
        # Where requests outlive an update, the prefix cache does too: what old weights put there must not be found.
        return parameters | {"cache_salt": str(version)} if self._training.max_staleness else parameters

    async def _up_to_date(self, version: int, processes: Processes) -> dict[str, EngineClient]:
        """Return which engines of `processes` hold the current weights.

        EngineError when none holds them, unless lost engines come back.
        """
        current = {name: client for name, client in self._clients.items() if name in processes}
        if version == 0:
            return current
        versions = await asyncio.gather(
            *(self._version_of(client) for client in current.values()), return_exceptions=True
        )
        failure: EngineError | None = None
        for (name, client), answer in zip(list(current.items()), versions, strict=True):
            if isinstance(answer, BaseException) and not (self._restarts and isinstance(answer, EngineError)):
                raise answer
            if answer != str(version):
                what = f"is not used: it has weights of version {answer}, not {version}"
                failure = answer if isinstance(answer, EngineError) else EngineError(client.engine, what)
                logger.warning("%s", failure)
                del current[name]
        self._failure = failure or self._failure
        if failure is not None and not current and not self._restarts:
            raise EngineError(failure.engine, f"{failure.what}, and no engine has weights of version {version}")
        return current

    async def _version_of(self, client: EngineClient) -> str:
        return await self._link.watch.unless_lost([client.engine.name], client.weight_version())


def _key(prompt: Prompt) -> Key:
    return prompt.index, prompt.seed
