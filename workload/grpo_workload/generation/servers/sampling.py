"""Sends one rank's prompts to the engines that hold the current weights; when one is lost, to the remaining ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation import vllm_api
from grpo_workload.generation.base import Listener
from grpo_workload.generation.servers.engine_watch import EngineLink
from grpo_workload.generation.servers.http_client import EngineClient, EngineError, RefusedError
from grpo_workload.generation.servers.roster import Processes
from grpo_workload.generation.servers.routing import Router
from grpo_workload.spec.contract import Contract

logger = logging.getLogger(__name__)

Done = dict[int, list[Completion]]
"""Completions, by the position of their prompt."""


class Sampler:
    """Samples completions of one rank's prompts on its engines."""

    def __init__(self, link: EngineLink, contract: Contract, rank: int) -> None:
        self._link, self._rank = link, rank
        self._training = contract.config.training
        self._restarts = contract.restart_engines
        self._vllm = vllm_api.installed()

    async def sample(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        done: Done,
        processes: Processes,
        version: int,
        listener: Listener,
    ) -> EngineError | None:
        """Sample completions of the prompts that are not in `done` yet.

        Args:
            prompts: this rank's prompts.
            num_samples: number of completions of each prompt.
            done: receives the completions of each finished prompt. A prompt whose engine is lost is sampled again on
                another engine, with the same seed.
            processes: processes that hold the current weights, by engine.
            version: version of these weights.
            listener: is told of each prompt whose completions are there.

        Returns:
            None when all prompts are done; else, if lost engines come back, why no engine remains.

        Raises:
            ValueError: an engine refuses a prompt.
            EngineError: an engine failed, and lost engines do not come back.
        """
        remaining = [position for position in range(len(prompts)) if position not in done]
        if not remaining:
            return None
        clients, failure = await self._up_to_date(version)
        router = Router([client.engine for client in clients.values()], first=self._rank)

        async def complete(position: int) -> None:
            nonlocal failure
            while (lane := await router.acquire(num_samples)) is not None:
                client, prompt = clients[lane.engine.name], prompts[position]
                work = client.complete(
                    prompt.token_ids,
                    model=processes[lane.engine.name],
                    num_samples=num_samples,
                    sampling=vllm_api.sampling_parameters(self._training) | {"seed": prompt.seed},
                    version=version,
                )
                try:
                    done[position] = await self._link.sample(client, processes[lane.engine.name], work)
                    listener.finished(position, done[position])
                    return
                except RefusedError as error:
                    raise ValueError(f"prompt {prompt.index} of the dataset: {error}") from error
                except EngineError as error:
                    if not self._restarts:
                        raise
                    logger.warning("sending prompt %d to another engine: %s", prompt.index, error)
                    failure = error
                    router.close(lane)
                finally:
                    router.release(lane, num_samples)

        try:
            async with asyncio.TaskGroup() as group:
                for position in remaining:
                    group.create_task(complete(position))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return failure if len(done) < len(prompts) else None

    async def _up_to_date(self, version: int) -> tuple[dict[str, EngineClient], EngineError | None]:
        """Return the engines that hold the current weights, and why another one does not.

        EngineError when none holds them, unless lost engines come back.
        """
        current = {client.engine.name: client for client in self._link.clients}
        if version == 0 or not vllm_api.reports_weight_version(self._vllm):
            return current, None
        failure: EngineError | None = None
        versions = await asyncio.gather(
            *(self._version_of(client) for client in current.values()), return_exceptions=True
        )
        for (name, client), answer in zip(list(current.items()), versions, strict=True):
            if isinstance(answer, BaseException) and not (self._restarts and isinstance(answer, EngineError)):
                raise answer
            if answer != str(version):
                what = f"is not used: it has weights of version {answer}, not {version}"
                failure = answer if isinstance(answer, EngineError) else EngineError(client.engine, what)
                logger.warning("%s", failure)
                del current[name]
        if not current and not self._restarts:
            assert failure is not None
            raise EngineError(failure.engine, f"{failure.what}, and no engine has weights of version {version}")
        return current, failure

    async def _version_of(self, client: EngineClient) -> str:
        return await self._link.unless_lost(client, client.weight_version())
