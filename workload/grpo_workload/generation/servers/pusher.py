"""The engines that have the current weights: pushes to them, tried again when one is lost; on all ranks together.

If lost engines come back (`Contract.restart_engines`), what could not be pushed waits until every engine is healthy
again. The transfer groups are then rebuilt and get all weights of the current version. Elastic engines are not waited
for: at each push, the group consists of those that all ranks see, and that can join it. One that answers but cannot
take part is set aside for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat

from grpo_spec.contract import Contract, Device
from grpo_spec.errors import ConfigError
from grpo_workload.generation.base import Weights
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.generation.servers.http_client import EngineClient
from grpo_workload.generation.servers.roster import Processes, Roster, absent, agreed, is_lost
from grpo_workload.generation.servers.set_aside import SetAside
from grpo_workload.generation.servers.weight_sender import WeightSender
from grpo_workload.generation.vllm_api import Backend
from grpo_workload.ranks.collectives import gather
from grpo_workload.weights.differ import WeightsDifferError

logger = logging.getLogger(__name__)

# A lost engine may take this many times rendezvous.timeoutSeconds to return: to be noticed and scheduled, and to load.
RETURN_TIMEOUTS = 2
PUSH_TRIES = 5  # if each try is ended by the loss of an engine


class Pusher:
    """One rank's part in pushes. All methods but `left_out` and `blame` are collective."""

    def __init__(self, contract: Contract, rank: int, link: EngineLink, weights: Callable[[], Weights]) -> None:
        """`weights` returns the current weights at each call, for engines that came back."""
        self._restarts, self._timeout = contract.restart_engines, contract.timeout_seconds
        self._patience = RETURN_TIMEOUTS * contract.timeout_seconds if self._restarts else None
        self._link, self._weights = link, weights
        self.roster, self._aside = Roster(), SetAside(link.timing.again)
        backend: Backend = "nccl" if contract.device == Device.CUDA else "gloo"
        keep = contract.config.training.max_staleness > 0  # requests go on through updates
        self.sender: WeightSender | None = None
        self.transfer: int | None = None
        """Index of the transfer group in which this rank sends."""
        for index, group in enumerate(contract.transfers):
            if group.sender == rank:
                as_loaded = contract.config.begins_as_loaded
                self.sender = WeightSender(group, link, backend, keep=keep, begins_as_loaded=as_loaded)
                self.transfer = index

    def begin(self) -> None:
        """Wait for the engines, which have loaded the initial weights, and form the transfer groups.

        EngineError, on every rank, names an engine that failed.
        """
        self.agree(self._link.wait_ready)
        self.with_engines(self.join)
        self.roster.pushed()

    def push(self, weights: Weights, version: int) -> None:
        """Push `weights` to all engines. EngineError on every rank names the engine that failed.

        If lost engines come back: when one is lost meanwhile, push them again after it came back.
        """
        if not self._restarts:
            self.agree(lambda: self._push(weights, version))
            return
        sources = chain([lambda: weights], repeat(self._weights))

        def push(processes: Processes) -> None:
            if self.roster.group != processes:
                self.join(processes)
            self.roster.begin_push()
            current = next(sources)()
            self.agree(lambda: self._push(current, version))
            self.roster.pushed()
            self._aside.joined(processes)

        self.with_engines(push)

    def with_engines(self, work: Callable[[Processes], None]) -> None:
        """Do collective `work` once all engines are healthy; repeat it after an engine was lost in it.

        An elastic engine that fails although it is healthy is set aside.
        """
        losses = 0
        while True:
            processes = self._await_engines()
            try:
                work(self._admit(processes))
                break
            except EngineError as error:
                self.roster.failed()
                if not self._restarts:
                    raise
                if self.is_any_lost(processes):
                    losses += 1
                    if losses == PUSH_TRIES:
                        raise
                elif not may_be_left_out(error):
                    raise
                else:
                    self._leave_out(error, processes)
                logger.warning("pushing all weights again: %s", error)

    def _admit(self, processes: Processes) -> Processes:
        """Return `processes` without new elastic engines that cannot join a transfer group; collective.

        Each one tries with the sender alone, since one that cannot would hold up all others in a group. After the first
        that fails, the rest try at the next push: no push waits for more than one.
        """
        admitted, newcomers = dict(processes), self.roster.newcomers(processes, self._link.elastic)
        for place, name in enumerate(newcomers):
            (client,) = (client for client in self._link.clients if client.engine.name == name)
            try:
                self.agree(partial(self._try_alone, client))
            except EngineError as error:
                if error.engine.name != name or not may_be_left_out(error):
                    raise
                self._leave_out(error, processes)
                for rest in newcomers[place:]:
                    del admitted[rest]
                break
            self.roster.able.add(processes[name])
        return admitted

    def _try_alone(self, client: EngineClient) -> None:
        if self.sender is not None:
            self.sender.try_alone(client)

    def _leave_out(self, error: EngineError, processes: Processes) -> None:
        self.roster.able.discard(processes[error.engine.name])
        seconds = self._aside.add(processes[error.engine.name], error)
        logger.warning("%s; it is left out, and tried again in %g s", error, seconds)

    def _await_engines(self) -> Processes:
        """Wait until all ranks see the same healthy processes and return these; EngineError if an engine stays away."""
        end = time.monotonic() + (self._patience or 0)
        while True:
            # All ranks poll together: if one waited alone, the others would hang in a collective until its deadline.
            gathered = gather((self._aside.rest(self._link.observe()), time.monotonic() > end))
            observations = [observation for observation, _ in gathered]
            if (processes := agreed(observations, self._link.elastic)) is not None:
                return processes
            if any(is_late for _, is_late in gathered):
                raise absent(observations, self._patience)
            time.sleep(self._link.timing.poll)

    def left_out(self) -> list[str]:
        """See `Generator.left_out`."""
        return [*self._aside.reasons(), *self._link.watch.left_out()]

    def blame(self, error: Exception) -> Exception:
        """See `Generator.blame`. If lost engines come back, their loss ends no rank: it did not cause `error`."""
        return error if self._restarts else self._link.blame(error)

    def is_any_lost(self, known: Processes) -> bool:
        """Return whether any rank sees an unhealthy engine, or another process than the `known` one; collective."""
        return is_lost(known, gather(self._link.observe()), self._link.elastic)

    def join(self, processes: Processes) -> None:
        """Form the transfer groups of these processes."""
        self.roster.begin_group()
        clients = [client for client in self._link.clients if client.engine.name in processes]
        self._link.use([client.engine.name for client in clients])

        def join() -> None:
            if self.sender is not None:
                members = [client for client in clients if client.engine.transfer == self.transfer]
                self.sender.join(members, limit=self._timeout)

        self.agree(join)
        self.roster.joined(processes)

    def _push(self, weights: Weights, version: int) -> None:
        remaining = iter(weights)
        try:
            if self.sender is not None:
                self.sender.push(weights.specs, remaining, version)
        finally:
            for _ in remaining:  # gathering is collective: a sender that failed must still take part to the end
                pass

    def agree(self, work: Callable[[], None]) -> None:
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


def may_be_left_out(error: EngineError) -> bool:
    """Return whether training goes on without the engine: not if another engine would fail in the same way."""
    return error.engine.elastic and not isinstance(error, ConfigError | WeightsDifferError)
