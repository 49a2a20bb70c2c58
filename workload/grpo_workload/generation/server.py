"""vLLM servers apart from the trainer's ranks: on pods of their own (Server), or beside the ranks of each pod (NodeLocal).

Each rank sends its own prompts, to all engines or to those of its own pod, and all samples of a prompt to one engine. Weights go from
the ranks that the contract names as senders to the engines of their transfer group; the other ranks only take part in gathering them.

Where lost engines come back (`Contract.restart_engines`), a rank goes on with the engines that are left. All ranks meet at the end of
`generate` and at each push: what could not be sampled, or pushed, waits until every engine is well again; then the transfer groups are
built anew and get all weights of the current version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain, count, repeat

from grpo_workload.collectives import gather
from grpo_workload.config import Topology
from grpo_workload.contract import Contract, Device, Engine
from grpo_workload.generation.base import Weights
from grpo_workload.generation.engine_client import EngineError
from grpo_workload.generation.engine_link import EngineLink, Timing
from grpo_workload.generation.roster import Processes, Roster, Sight, agreed, is_lost
from grpo_workload.generation.sampling import Done, Sampler
from grpo_workload.generation.transfer import WeightSender
from grpo_workload.generation.vllm_api import Backend
from grpo_workload.types import Completion, Prompt

logger = logging.getLogger(__name__)

# Of rendezvous.timeoutSeconds: a lost engine has as long to load as at the start of the job, and as long again to be noticed and placed.
RETURN = 2
ATTEMPTS = 5  # to push, where each was ended by the loss of an engine


class ServerGenerator:
    """The engines that one rank generates on, and feeds if it is a sender."""

    def __init__(self, contract: Contract, rank: int, weights: Callable[[], Weights], timing: Timing = Timing()) -> None:  # noqa: B008
        """Wait for the engines and join the transfer groups; collective.

        Args:
            contract: the job's.
            rank: this one.
            weights: the current weights, anew at each call and collective as those of `sync_weights`: for engines that came back.
            timing: of the watch over the engines.

        Raises:
            EngineError: on every rank, naming the engine that failed.
        """
        self._restarts = contract.restart_engines
        self._patience = RETURN * contract.timeout_seconds if self._restarts else None
        self._version = 0
        self._weights = weights
        self._link = EngineLink(engines_of(contract, rank), deadline=contract.timeout_seconds, restarts=self._restarts, timing=timing)
        self._sampler = Sampler(self._link, contract, rank)
        self._roster = Roster()
        backend: Backend = "nccl" if contract.device == Device.CUDA else "gloo"
        self._sender: WeightSender | None = None
        for index, group in enumerate(contract.transfers):
            if group.sender == rank:
                clients = [client for client in self._link.clients if client.engine.transfer == index]
                self._sender = WeightSender(group, clients, self._link, backend)
        self._agree(self._link.wait_ready)
        self._with_engines(self._join)
        self._roster.pushed()  # what they have loaded is version 0

    def generate(self, prompts: Sequence[Prompt], num_generations: int) -> list[list[Completion]]:
        """See `Generator.generate`. ValueError for a prompt that leaves no room for its completion, EngineError."""
        for prompt in prompts:
            self._sampler.check_length(prompt)
        done: Done = {}
        if not self._restarts:
            self._link.run(self._sampler.sample(prompts, num_generations, done, self._roster.current, self._version))
        while self._restarts:
            work = self._sampler.sample(prompts, num_generations, done, self._roster.current, self._version)
            failure = self._link.run_freely(work)
            if (lacking := first(gather(failure))) is None:
                break
            if not self._is_any_lost(self._roster.current):
                raise failure or lacking
            self._push_all(self._weights(), self._version)
        return [done[position] for position in range(len(prompts))]

    def sleep(self) -> None:
        """Nothing to give back: the engines have devices of their own."""

    def expect_weights(self) -> None:
        """See `Generator.expect_weights`: the engines pause while the ranks train."""
        if self._sender is not None:
            self._sender.pause_ahead()

    def sync_weights(self, weights: Weights, version: int) -> None:
        """See `Generator.sync_weights`. EngineError, on every rank, names the engine that failed."""
        if self._restarts:
            self._push_all(weights, version)
        else:
            self._agree(lambda: self._push(weights, version))
        self._version = version

    def blame(self, error: Exception) -> Exception:
        """The EngineError of an engine that is not healthy, else `error`, for example of a collective whose other ranks are gone.

        Where engines come back, their loss ends no rank, and one that is away just now has nothing to do with it.
        """
        return error if self._restarts else self._link.blame(error)

    def close(self) -> None:
        """See `Generator.close`. The engines run on: whoever started them ends them."""
        self._link.close()

    def _push_all(self, weights: Weights, version: int) -> None:
        """Bring `weights` to all engines, or the same ones again to those that came back meanwhile."""
        passes = chain([lambda: weights], repeat(self._weights))

        def push(processes: Processes) -> None:
            if self._roster.group != processes:
                self._join(processes)
            self._roster.begin_push()
            once = next(passes)()
            self._agree(lambda: self._push(once, version))
            self._roster.pushed()

        self._with_engines(push)

    def _with_engines(self, work: Callable[[Processes], None]) -> None:
        """Do collective `work` when all engines are well, and once more after one was lost in it."""
        for attempt in count(1):
            processes = self._await_engines()
            try:
                work(processes)
                break
            except EngineError as error:
                self._roster.failed()
                if not self._restarts or attempt == ATTEMPTS or not self._is_any_lost(processes):
                    raise
                logger.warning("the engines get all weights again: %s", error)

    def _await_engines(self) -> Processes:
        """Which processes the engines are, as all ranks see it; EngineError for one that does not come back."""
        end = time.monotonic() + (self._patience or 0)
        while True:
            # In step: a rank that waited by itself would leave the others in a collective, which has a deadline of its own.
            gathered = gather((self._link.look(), time.monotonic() > end))
            sights = [sight for sight, _ in gathered]
            if (processes := agreed(sights)) is not None:
                return processes
            if any(is_late for _, is_late in gathered):
                raise absent(sights, self._patience)
            time.sleep(self._link.timing.look)

    def _is_any_lost(self, known: Processes) -> bool:
        """Whether any rank sees an engine that is ill, or another process than the `known` one; collective."""
        return is_lost(known, gather(self._link.look()))

    def _join(self, processes: Processes) -> None:
        generation = self._roster.begin_group()

        def join() -> None:
            if self._sender is not None:
                self._sender.join(generation)

        self._agree(join)
        self._roster.joined(processes)

    def _push(self, weights: Weights, version: int) -> None:
        remaining = iter(weights)
        try:
            if self._sender is not None:
                self._sender.push(weights.specs, remaining, version)
        finally:
            for _ in remaining:  # gathering is collective: also a sender that has failed takes part to the end
                pass

    def _agree(self, work: Callable[[], None]) -> None:
        """Do this rank's part of something that all ranks do, and fail on all of them if it fails on one for an engine's sake."""
        failure: EngineError | None = None
        try:
            work()
        except EngineError as error:
            failure = error
        except RuntimeError as error:  # the members of a group may fail before anyone knows of the engine that has
            blamed = self._link.blame_in_time(error) if self._restarts else error
            if not isinstance(blamed, EngineError):
                raise
            failure = blamed
        try:
            failures = gather(failure)
        except RuntimeError as error:  # a rank is gone, perhaps for an engine's sake
            raise failure or self.blame(error) from error
        if (theirs := first(failures)) is not None:
            raise failure or theirs


def engines_of(contract: Contract, rank: int) -> list[Engine]:
    """The engines that a rank generates on: all of them, or with NodeLocal those of its own pod."""
    if contract.config.generation.topology == Topology.SERVER:
        return list(contract.engines)
    (pod,) = [member.pod for member in contract.members if member.rank_offset <= rank < member.rank_offset + member.gpus]
    return [engine for engine in contract.engines if engine.pod == pod]


def absent(sights: Sequence[Sight], patience: float | None) -> RuntimeError:
    """Why engines cannot be used; `patience` is how many seconds were waited for one that was lost."""
    for sight in sights:
        if sight.ill is not None:
            waited = "" if patience is None else f"was lost, and was not well again within {patience:g} s: it "
            return EngineError(sight.ill, f"{waited}{sight.trouble}")
    return RuntimeError("ranks see different processes of the same engines: " + "; ".join(str(dict(sight.processes)) for sight in sights))


def first(failures: Sequence[EngineError | None]) -> EngineError | None:
    """The failure of the first rank that has one."""
    return next((failure for failure in failures if failure is not None), None)
