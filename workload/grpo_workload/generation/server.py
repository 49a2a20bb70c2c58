"""vLLM servers apart from the trainer's ranks: on pods of their own (Server), or beside the ranks of each pod (NodeLocal).

Each rank sends its own prompts, to all engines or to those of its own pod, and all samples of a prompt to one engine. Weights go from
the ranks that the contract names as senders to the engines of their transfer group; the other ranks only take part in gathering them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from grpo_workload.collectives import gather
from grpo_workload.config import Topology, TrainingConfig
from grpo_workload.contract import Contract, Device, Engine
from grpo_workload.generation import vllm_api
from grpo_workload.generation.base import Weights
from grpo_workload.generation.engine_client import EngineClient, EngineError, RefusedError
from grpo_workload.generation.engine_link import EngineLink, Timing, settle
from grpo_workload.generation.routing import Lane, Router
from grpo_workload.generation.transfer import WeightSender
from grpo_workload.types import Completion, Prompt

logger = logging.getLogger(__name__)


class ServerGenerator:
    """The engines that one rank generates on, and feeds if it is a sender."""

    def __init__(self, contract: Contract, rank: int, timing: Timing = Timing()) -> None:  # noqa: B008  # frozen
        """Wait for the engines and join the transfer groups; collective. EngineError, on every rank, names the engine that failed."""
        self._training = contract.config.training
        self._max_model_len = contract.config.generation.max_model_len
        self._vllm = vllm_api.installed()
        self._version = 0
        self._link = EngineLink(engines_of(contract, rank), deadline=contract.timeout_seconds, timing=timing)
        self._rank = rank
        self._models: dict[str, str] = {}
        self._sender: WeightSender | None = None
        self._agree(lambda: self._join(contract))

    def generate(self, prompts: Sequence[Prompt], num_generations: int) -> list[list[Completion]]:
        """See `Generator.generate`. ValueError for a prompt that leaves no room for its completion, EngineError."""
        for prompt in prompts:
            self._check_length(prompt)
        return self._link.run(self._generate(prompts, num_generations))

    def sleep(self) -> None:
        """Nothing to give back: the engines have devices of their own."""

    def sync_weights(self, weights: Weights, version: int) -> None:
        """See `Generator.sync_weights`. EngineError, on every rank, names the engine that failed."""
        remaining = iter(weights)

        def push() -> None:
            try:
                if self._sender is not None:
                    self._sender.push(remaining, version)
            finally:
                for _ in remaining:  # gathering is collective: also a sender that has failed takes part to the end
                    pass

        self._agree(push)
        self._version = version

    def blame(self, error: Exception) -> Exception:
        """The EngineError of an engine that is not healthy, else `error`, for example of a collective whose other ranks are gone."""
        return self._link.blame(error)

    def close(self) -> None:
        """See `Generator.close`. The engines run on: whoever started them ends them."""
        self._link.close()

    def _join(self, contract: Contract) -> None:
        self._link.wait_ready()
        names = self._link.run(settle(self._link.clients, [client.identify() for client in self._link.clients]))
        self._models = {client.engine.name: name for client, name in zip(self._link.clients, names, strict=True)}
        for index, group in enumerate(contract.transfers):
            if group.sender == self._rank:
                clients = [client for client in self._link.clients if client.engine.transfer == index]
                self._sender = WeightSender(group, clients, self._link, "nccl" if contract.device == Device.CUDA else "gloo")

    def _agree(self, work: Callable[[], None]) -> None:
        """Do this rank's part of something that all ranks do, and fail on all of them if it fails on one for an engine's sake."""
        failure: EngineError | None = None
        try:
            work()
        except EngineError as error:
            failure = error
        try:
            failures = [error for error in gather(failure) if error is not None]
        except RuntimeError as error:  # a rank is gone, perhaps for an engine's sake
            raise failure or self.blame(error) from error
        if failures:
            raise failure or failures[0]

    def _check_length(self, prompt: Prompt) -> None:
        if self._max_model_len is None:
            return
        room = self._max_model_len - self._training.max_completion_length
        if len(prompt.token_ids) > room:
            raise ValueError(
                f"prompt {prompt.index} of the dataset has {len(prompt.token_ids)} tokens; generation.maxModelLen less "
                f"training.maxCompletionLength leaves {room}"
            )

    async def _generate(self, prompts: Sequence[Prompt], num_generations: int) -> list[list[Completion]]:
        clients = {client.engine.name: client for client in await self._up_to_date()}
        router = Router([client.engine for client in clients.values()], first=self._rank)
        tasks: list[asyncio.Task[list[Completion]]] = []

        async def complete(lane: Lane, prompt: Prompt) -> list[Completion]:
            try:
                return await clients[lane.engine.name].complete(
                    prompt.token_ids,
                    model=self._models[lane.engine.name],
                    num_samples=num_generations,
                    sampling=sampling_parameters(self._training, prompt.seed),
                    version=self._version,
                )
            except RefusedError as error:
                raise ValueError(f"prompt {prompt.index} of the dataset: {error}") from error
            finally:
                router.release(lane, num_generations)

        try:
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    lane = await router.acquire(num_generations)
                    tasks.append(group.create_task(complete(lane, prompt)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _up_to_date(self) -> list[EngineClient]:
        """Engines that hold the current weights. EngineError when none does."""
        clients = self._link.clients
        if self._version == 0 or not vllm_api.tells_weight_version(self._vllm):
            return clients
        versions = await settle(clients, [client.weight_version() for client in clients])
        held = dict(zip(clients, versions, strict=True))
        for client, version in held.items():
            if version != str(self._version):
                logger.warning("%s", EngineError(client.engine, f"is left out: it has weights {version}, not {self._version}"))
        current = [client for client, version in held.items() if version == str(self._version)]
        if not current:
            raise EngineError(clients[0].engine, f"has weights {versions[0]}, and no engine has weights {self._version}")
        return current


def engines_of(contract: Contract, rank: int) -> list[Engine]:
    """The engines that a rank generates on: all of them, or with NodeLocal those of its own pod."""
    if contract.config.generation.topology == Topology.SERVER:
        return list(contract.engines)
    (pod,) = [member.pod for member in contract.members if member.rank_offset <= rank < member.rank_offset + member.gpus]
    return [engine for engine in contract.engines if engine.pod == pod]


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
