"""The generator for vLLM servers: on their own pods (Server), or on the pods of the ranks (NodeLocal).

Each rank sends its own prompts to all engines, or to those of its pod; one engine samples all completions of a prompt.
The ranks that the contract names as senders push weights to the engines of their transfer group. The other ranks only
take part in gathering the weights.

If lost engines come back (`Contract.restart_engines`), a rank continues with the remaining ones. All ranks synchronise
at the end of `generate` and at each push: what could not be sampled or pushed waits until every engine is healthy
again. The transfer groups are then rebuilt and get all weights of the current version. Elastic engines are not waited
for: at each push, the group consists of those that all ranks see.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain, count, repeat

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation.base import SILENCE, Listener, Weights
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.engine_watch import Timing
from grpo_workload.generation.servers.http_client import EngineError
from grpo_workload.generation.servers.roster import Processes, Roster, absent, agreed, is_lost
from grpo_workload.generation.servers.sampling import Sampler
from grpo_workload.generation.servers.weight_sender import WeightSender
from grpo_workload.generation.vllm_api import Backend
from grpo_workload.ranks.collectives import gather
from grpo_workload.spec.contract import Contract, Device, Engine

logger = logging.getLogger(__name__)

# A lost engine may take this many times rendezvous.timeoutSeconds to return: to be noticed and scheduled, and to load.
RETURN_TIMEOUTS = 2
PUSH_TRIES = 5  # if each try is ended by the loss of an engine


class ServerGenerator:
    """Generates on the engines of one rank, and pushes weights to them if the rank is a sender."""

    def __init__(
        self, contract: Contract, rank: int, weights: Callable[[], Weights], timing: Timing = Timing()
    ) -> None:
        """Wait for the engines and join the transfer groups; collective.

        Args:
            contract: the job's contract.
            rank: this rank.
            weights: returns the current weights at each call, for engines that came back; iterating them is collective.
            timing: times of the watch over the engines.

        Raises:
            EngineError: an engine failed; every rank names it.
        """
        self._restarts = contract.restart_engines
        self._patience = RETURN_TIMEOUTS * contract.timeout_seconds if self._restarts else None
        self._keep = contract.config.training.max_staleness > 0  # requests go on through updates
        self._version, self._weights = 0, weights
        self._engines = contract.engines
        self._link = EngineLink(
            contract.engines_of(rank), deadline=contract.timeout_seconds, restarts=self._restarts, timing=timing
        )
        self._sampler = Sampler(self._link, contract, rank)
        self._roster = Roster()
        backend: Backend = "nccl" if contract.device == Device.CUDA else "gloo"
        self._sender: WeightSender | None = None
        self._transfer: int | None = None
        for index, group in enumerate(contract.transfers):
            if group.sender == rank:
                self._sender, self._transfer = WeightSender(group, self._link, backend, keep=self._keep), index
        self._agree(self._link.wait_ready)
        self._with_engines(self._join)
        self._roster.pushed()  # the engines have loaded the initial weights, version 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        listener: Listener = SILENCE,
        temperature: float | None = None,
    ) -> list[list[Completion]]:
        """See `Generator.generate`; with a temperature, `Generator.evaluate`.

        Raises:
            ValueError: an engine refuses a prompt.
            EngineError: an engine failed.
        """
        self._link.watch.on_moved = listener.moved
        run = self._link.run_freely if self._restarts else self._link.run
        while True:
            self.begin(prompts, num_generations, listener, temperature)
            failure = run(self._sampler.wait(prompts))
            if not self._restarts:
                break
            listener.meet()
            if (any_failure := first(gather(failure))) is None:
                break
            if not self._is_any_lost(self._roster.current):
                raise failure or any_failure
            self._push_all(self._weights(), self._version)
        self._link.watch.on_moved = SILENCE.moved
        return self._sampler.take(prompts)

    def begin(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        listener: Listener = SILENCE,
        temperature: float | None = None,
    ) -> None:
        """See `Generator.begin`. Raises as `generate`."""
        run = self._link.run_freely if self._restarts else self._link.run
        current, version = self._roster.current, self._version
        run(self._sampler.begin(prompts, num_generations, current, version, listener, temperature))

    def evaluate(
        self, prompts: Sequence[Prompt], num_generations: int, temperature: float, listener: Listener = SILENCE
    ) -> list[list[Completion]]:
        """See `Generator.evaluate`. Raises as `generate`."""
        return self.generate(prompts, num_generations, listener, temperature)

    def sleep(self) -> None:
        """Do nothing: the engines have their own devices."""

    def expect_weights(self) -> None:
        """See `Generator.expect_weights`. Engines without further requests pause while the ranks train."""
        if self._sender is not None and not self._keep:
            self._sender.pause_ahead()

    def sync_weights(self, weights: Weights, version: int) -> None:
        """See `Generator.sync_weights`. EngineError on every rank names the engine that failed."""
        with self._link.watch.paused():
            if self._restarts:
                self._push_all(weights, version)
            else:
                self._agree(lambda: self._push(weights, version))
        self._version = version
        self._sampler.updated(version)

    def logprobs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """See `Generator.logprobs`. EngineError on every rank names an engine that failed, unless lost ones return."""
        found: dict[str, list[float]] = {}

        def ask() -> None:
            for client in self._link.clients:
                if client.engine.transfer == self._transfer and client.engine.name in self._roster.current:
                    work = client.score(token_ids, model=self._roster.current[client.engine.name])
                    found[f"engine {client.engine.name}"] = self._link.run(work)

        if not self._restarts:
            self._agree(ask)
            return found
        try:
            ask()
        except EngineError as error:  # it is noticed when the ranks generate, and gets all weights again
            logger.warning("weights are not checked: %s", error)
        return found

    def idle_seconds(self) -> float:
        """See `Generator.idle_seconds`."""
        return self._sampler.idle_seconds()

    def engines(self) -> list[Engine]:
        """See `Generator.engines`. With NodeLocal, those of all pods: none of them ever joins or leaves."""
        return [engine for engine in self._engines if not engine.elastic or engine.name in self._roster.current]

    def blame(self, error: Exception) -> Exception:
        """Return the EngineError of an unhealthy engine, else `error`, such as that of a collective with lost ranks.

        If lost engines come back, their loss ends no rank, so an engine that is away did not cause `error`.
        """
        return error if self._restarts else self._link.blame(error)

    def close(self) -> None:
        """See `Generator.close`. The engines keep running; their pods end them."""
        self._link.close()

    def _push_all(self, weights: Weights, version: int) -> None:
        """Push `weights` to all engines; if an engine is lost meanwhile, push them again after it came back."""
        sources = chain([lambda: weights], repeat(self._weights))

        def push(processes: Processes) -> None:
            if self._roster.group != processes:
                self._join(processes)
            self._roster.begin_push()
            current = next(sources)()
            self._agree(lambda: self._push(current, version))
            self._roster.pushed()

        self._with_engines(push)

    def _with_engines(self, work: Callable[[Processes], None]) -> None:
        """Do collective `work` once all engines are healthy; repeat it after an engine was lost in it."""
        for attempt in count(1):
            processes = self._await_engines()
            try:
                work(processes)
                break
            except EngineError as error:
                self._roster.failed()
                if not self._restarts or attempt == PUSH_TRIES or not self._is_any_lost(processes):
                    raise
                logger.warning("pushing all weights again: %s", error)

    def _await_engines(self) -> Processes:
        """Wait until all ranks see the same healthy processes and return these; EngineError if an engine stays away."""
        end = time.monotonic() + (self._patience or 0)
        while True:
            # All ranks poll together: if one waited alone, the others would hang in a collective until its deadline.
            gathered = gather((self._link.observe(), time.monotonic() > end))
            observations = [observation for observation, _ in gathered]
            if (processes := agreed(observations, self._link.elastic)) is not None:
                return processes
            if any(is_late for _, is_late in gathered):
                raise absent(observations, self._patience)
            time.sleep(self._link.timing.poll)

    def _is_any_lost(self, known: Processes) -> bool:
        """Return whether any rank sees an unhealthy engine, or another process than the `known` one; collective."""
        return is_lost(known, gather(self._link.observe()), self._link.elastic)

    def _join(self, processes: Processes) -> None:
        round_number = self._roster.begin_group()
        clients = [client for client in self._link.clients if client.engine.name in processes]
        self._link.use([client.engine.name for client in clients])

        def join() -> None:
            if self._sender is not None:
                members = [client for client in clients if client.engine.transfer == self._transfer]
                self._sender.join(round_number, members)

        self._agree(join)
        self._roster.joined(processes)

    def _push(self, weights: Weights, version: int) -> None:
        remaining = iter(weights)
        try:
            if self._sender is not None:
                self._sender.push(weights.specs, remaining, version)
        finally:
            for _ in remaining:  # gathering is collective: a sender that failed must still take part to the end
                pass

    def _agree(self, work: Callable[[], None]) -> None:
        """Do this rank's part of collective `work`; if an engine fails it on one rank, raise EngineError on all."""
        failure: EngineError | None = None
        try:
            work()
        except EngineError as error:
            failure = error
        except RuntimeError as error:  # a group's members may fail before the loss of the engine is known
            blamed = self._link.blame_in_time(error) if self._restarts else error
            if not isinstance(blamed, EngineError):
                raise
            failure = blamed
        try:
            failures = gather(failure)
        except RuntimeError as error:  # a rank is gone, perhaps because of an engine
            raise failure or self.blame(error) from error
        if (theirs := first(failures)) is not None:
            raise failure or theirs


def first(failures: Sequence[EngineError | None]) -> EngineError | None:
    """Return the failure of the first rank that has one; None if no rank has."""
    return next((failure for failure in failures if failure is not None), None)
