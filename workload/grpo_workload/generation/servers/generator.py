"""The generator for vLLM servers: on their own pods (Server), or on the pods of the ranks (NodeLocal).

Each rank sends its own prompts to all engines, or to those of its pod; one engine samples all completions of a prompt.
The ranks that the contract names as senders push weights to the engines of their transfer group. The other ranks only
take part in gathering the weights.

If lost engines come back (`Contract.restart_engines`), a rank continues with the remaining ones. All ranks synchronise
at the end of `generate` and at each push: what could not be sampled or pushed waits (`pusher`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from grpo_spec.contract import Contract, Engine
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.generation.base import SILENCE, Listener, Weights
from grpo_workload.generation.episodes import Episodes
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.engine_watch import Timing
from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.generation.servers.pusher import Pusher, first
from grpo_workload.generation.servers.sampling import Sampler
from grpo_workload.ranks.collectives import gather

logger = logging.getLogger(__name__)


class ServerGenerator:
    """Generates on the engines of one rank, and pushes weights to them if the rank is a sender."""

    def __init__(
        self,
        contract: Contract,
        rank: int,
        weights: Callable[[], Weights],
        timing: Timing = Timing(),
        episodes: Episodes | None = None,
    ) -> None:
        """Wait for the engines and join the transfer groups; collective.

        Args:
            contract: the job's contract.
            rank: this rank.
            weights: returns the current weights at each call, for engines that came back; iterating them is collective.
            timing: times of the watch over the engines.
            episodes: plays those of a job with tools or environments; None for other jobs.

        Raises:
            EngineError: an engine failed; every rank names it.
        """
        self._restarts = contract.restart_engines
        self._keep = contract.config.training.max_staleness > 0  # requests go on through updates
        self._version, self._weights = 0, weights
        self._engines = contract.engines
        self._link = EngineLink(
            contract.engines_of(rank),
            deadline=contract.timeout_seconds,
            attempt=contract.attempt,
            restarts=self._restarts,
            timing=timing,
        )
        self._sampler = Sampler(self._link, contract, rank, episodes)
        self._pusher = Pusher(contract, rank, self._link, weights)
        self._pusher.begin()

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
            if not self._pusher.is_any_lost(self._pusher.roster.current):
                raise failure or any_failure
            self._pusher.push(self._weights(), self._version)
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
        current, version = self._pusher.roster.current, self._version
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
        if self._pusher.sender is not None and not self._keep:
            self._pusher.sender.pause_ahead()

    def sync_weights(self, weights: Weights, version: int) -> None:
        """See `Generator.sync_weights`. EngineError on every rank names the engine that failed."""
        self._link.run_freely(self._sampler.hold())
        with self._link.watch.paused():
            self._pusher.push(weights, version)
        self._version = version
        self._link.run_freely(self._sampler.updated(version))

    def logprobs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """See `Generator.logprobs`. EngineError on every rank names an engine that failed, unless lost ones return."""
        found: dict[str, list[float]] = {}
        current = self._pusher.roster.current

        def ask() -> None:
            for client in self._link.clients:
                if client.engine.transfer == self._pusher.transfer and client.engine.name in current:
                    work = client.score(token_ids, model=current[client.engine.name])
                    found[f"engine {client.engine.name}"] = self._link.run(work)

        if not self._restarts:
            self._pusher.agree(ask)
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
        return [engine for engine in self._engines if not engine.elastic or engine.name in self._pusher.roster.current]

    def left_out(self) -> list[str]:
        """See `Generator.left_out`."""
        return self._pusher.left_out()

    def blame(self, error: Exception) -> Exception:
        """Return the EngineError of an unhealthy engine, else `error`, such as that of a collective with lost ranks."""
        return self._pusher.blame(error)

    def close(self) -> None:
        """See `Generator.close`. The engines keep running; their pods end them."""
        self._link.close()
