"""One rank's prompts on the engines that hold the current weights, and on those that are left when one of them is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from grpo_workload.config import TrainingConfig
from grpo_workload.contract import Contract
from grpo_workload.generation import vllm_api
from grpo_workload.generation.engine_client import EngineClient, EngineError, RefusedError
from grpo_workload.generation.engine_link import EngineLink
from grpo_workload.generation.roster import Processes
from grpo_workload.generation.routing import Router
from grpo_workload.types import Completion, Prompt

logger = logging.getLogger(__name__)

Done = dict[int, list[Completion]]
"""Completions by the position of their prompt."""


class Sampler:
    """Sends prompts to engines."""

    def __init__(self, link: EngineLink, contract: Contract, rank: int) -> None:
        self._link, self._rank = link, rank
        self._training = contract.config.training
        self._max_model_len = contract.config.generation.max_model_len
        self._restarts = contract.restart_engines
        self._vllm = vllm_api.installed()

    def check_length(self, prompt: Prompt) -> None:
        """ValueError for a prompt that leaves no room for its completion."""
        if self._max_model_len is None:
            return
        room = self._max_model_len - self._training.max_completion_length
        if len(prompt.token_ids) > room:
            raise ValueError(
                f"prompt {prompt.index} of the dataset has {len(prompt.token_ids)} tokens; generation.maxModelLen less "
                f"training.maxCompletionLength leaves {room}"
            )

    async def sample(
        self, prompts: Sequence[Prompt], num_samples: int, done: Done, processes: Processes, version: int
    ) -> EngineError | None:
        """Complete the prompts that are not yet `done`.

        Args:
            prompts: this rank's.
            num_samples: completions of each.
            done: filled, prompt by prompt; one that an engine was lost with is sampled again, with the same seed, on another.
            processes: those that hold the weights, by engine.
            version: of the weights.

        Returns:
            None when all are done; else why no engine is left, where engines come back.

        Raises:
            ValueError: an engine refuses a prompt.
            EngineError: an engine failed, and will not come back.
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
                    sampling=sampling_parameters(self._training, prompt.seed),
                    version=version,
                )
                try:
                    done[position] = await self._link.while_well(client, work)
                    return
                except RefusedError as error:
                    raise ValueError(f"prompt {prompt.index} of the dataset: {error}") from error
                except EngineError as error:
                    if not self._restarts:
                        raise
                    logger.warning("prompt %d goes to another engine: %s", prompt.index, error)
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
        """Engines that hold the current weights, and why one does not. EngineError when none does, unless engines come back."""
        current = {client.engine.name: client for client in self._link.clients}
        if version == 0 or not vllm_api.tells_weight_version(self._vllm):
            return current, None
        failure: EngineError | None = None
        told = await asyncio.gather(*(self._told_version(client) for client in current.values()), return_exceptions=True)
        for (name, client), answer in zip(list(current.items()), told, strict=True):
            if isinstance(answer, BaseException) and not (self._restarts and isinstance(answer, EngineError)):
                raise answer
            if answer != str(version):
                what = f"is left out: it has weights {answer}, not {version}"
                failure = answer if isinstance(answer, EngineError) else EngineError(client.engine, what)
                logger.warning("%s", failure)
                del current[name]
        if not current and not self._restarts:
            assert failure is not None
            raise EngineError(failure.engine, f"{failure.what}, and no engine has weights {version}")
        return current, failure

    async def _told_version(self, client: EngineClient) -> str:
        return await self._link.while_well(client, client.weight_version())


def sampling_parameters(training: TrainingConfig, seed: int) -> dict[str, Any]:
    """All parameters of a request that the model's generation_config.json would otherwise have a say in, under vLLM's names."""
    return {
        "max_tokens": training.max_completion_length,
        "temperature": training.temperature,
        "top_p": training.top_p,
        "top_k": training.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
    }
