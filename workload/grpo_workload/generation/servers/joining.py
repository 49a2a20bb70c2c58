"""Forms transfer groups: the sender and the workers of engines, within a time after which the missing engine is named.

All members meet first (`roll_call`), so that workers wait in no group that cannot form.

NCCL sets no deadline. A thread whose group does not form although all members came stays in `ncclCommInitRank` until
the process ends: `ncclCommAbort` could end it only with a communicator that does not block, and vLLM's binding has
neither `ncclCommInitRankConfig` nor `ncclCommGetAsyncError`. Such threads hold a few sockets, and are counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, count, pairwise
from typing import Any, TypeVar

from grpo_spec.contract import TransferGroup
from grpo_workload.generation.gloo_group import GlooGroup
from grpo_workload.generation.roll_call import Invitation, RollCall, open_store
from grpo_workload.generation.servers.channels import Channel, NcclChannel, free_port
from grpo_workload.generation.servers.engine_link import EngineLink
from grpo_workload.generation.servers.errors import EngineError
from grpo_workload.generation.servers.http_client import EngineClient
from grpo_workload.generation.servers.waiting import in_thread, settle
from grpo_workload.generation.vllm_api import Backend

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_HANGING = 16
"""Number of threads that may hang in NCCL; with so many, no engine that is new is tried any more."""

POLL = 0.05  # seconds between two looks whether all workers are here
Seats = Sequence[tuple[EngineClient, range]]
"""Engines and the ranks of their workers."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A transfer group."""

    channel: Channel
    roll: RollCall
    seats: Seats

    @property
    def clients(self) -> list[EngineClient]:
        """Clients of its engines."""
        return [client for client, _ in self.seats]


class Joining:
    """Forms one group after another. Their members meet in a store that the sender serves all the time."""

    def __init__(
        self, group: TransferGroup, link: EngineLink, backend: Backend, use_device: Callable[[], None]
    ) -> None:
        """`use_device` makes the sender's device that of the thread. RuntimeError if the sender cannot listen."""
        self._group, self._link, self._backend, self._use_device = group, link, backend, use_device
        self._numbers = count(1)
        self._in_nccl: set[str] = set()  # meetings whose threads form an NCCL group now
        try:
            self._served = open_store(group.host, group.port, timeout_seconds=link.patience_to_join, listens=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {group.sender} cannot listen on {group.host}:{group.port} (transferPort of generation): {error}"
            ) from error

    def try_alone(self, client: EngineClient) -> None:
        """Form a group of the sender and this engine only, and leave it: if it cannot be, no other engine is affected.

        EngineError says why the engine cannot join, or names another one that was lost meanwhile.
        """
        if len(self._in_nccl) >= MOST_HANGING:
            raise EngineError(
                client.engine,
                f"is not tried: {MOST_HANGING} threads of rank {self._group.sender} hang in NCCL, as engines that the "
                "log names came but could not join. Compare NCCL_SOCKET_IFNAME with the network interfaces of their "
                "nodes, then suspend the job and let it go on: this ends the threads",
            )
        try:
            self.form([client], limit=self._link.patience_to_join).channel.close()
        except EngineError:
            raise
        except (RuntimeError, OSError) as error:
            raise EngineError(client.engine, f"cannot join a transfer group: {error}") from error

    def form(self, clients: Sequence[EngineClient], *, limit: float) -> Formed:
        """Form a group with these engines, in their order.

        Args:
            clients: of the engines.
            limit: seconds that it may take. For elastic engines it is `EngineLink.patience_to_join`, if that is less.

        Raises:
            EngineError: an engine failed, or did not join in time.
            RuntimeError: the group did not form, but no engine is to blame.
        """
        host, port = self._group.host, self._group.port
        meeting = str(next(self._numbers))
        roll = RollCall(open_store(host, port, timeout_seconds=limit), meeting)
        edges = list(accumulate((client.engine.world_size for client in clients), initial=1))
        seats = [(client, range(*ranks)) for client, ranks in zip(clients, pairwise(edges), strict=True)]

        def invite(client: EngineClient, ranks: range) -> Coroutine[Any, Any, None]:
            invitation = Invitation(
                host=host,
                port=port,
                meeting=meeting,
                rank_offset=ranks.start,
                world_size=edges[-1],
                patience=limit,
            )
            return client.init_transfer(asdict(invitation), deadline=2 * limit)

        def own() -> Channel:
            self._use_device()
            self._await_all(roll, seats)
            return self._open(roll, meeting, edges[-1], limit)

        work = settle(clients, [in_thread(own), *(invite(client, ranks) for client, ranks in seats)])
        try:
            channel: Channel
            channel, *_ = self._link.run(_within(limit, work))
            return Formed(channel, roll, seats)
        except TimeoutError as error:
            raise self._too_late(roll, seats, limit) from error
        finally:
            roll.call_off()
            if meeting in self._in_nccl:
                names = ", ".join(client.engine.name for client in clients)
                logger.warning("a thread hangs in NCCL, in a group with %s; %d do now", names, len(self._in_nccl))

    def _await_all(self, roll: RollCall, seats: Seats) -> None:
        """Wait until all workers are here; EngineError if one of an elastic engine is late."""
        start = time.monotonic()
        while missing := [client for client, ranks in seats if roll.missing(ranks)]:
            late = [client for client in missing if client.engine.elastic]
            if late and time.monotonic() - start > self._link.patience_to_join:
                raise self._absent(late[0], self._link.patience_to_join)
            if roll.is_over:
                raise RuntimeError("the transfer group was called off")
            time.sleep(POLL)

    def _open(self, roll: RollCall, meeting: str, world_size: int, limit: float) -> Channel:
        port = free_port() if self._backend == "nccl" else 0
        if not roll.let_join(str(port)):
            raise RuntimeError("the transfer group was called off")
        channel: Channel
        if self._backend == "nccl":
            self._in_nccl.add(meeting)
            try:
                channel = NcclChannel(self._group.host, port, world_size)
            finally:
                self._in_nccl.discard(meeting)
        else:
            store = open_store(self._group.host, self._group.port, timeout_seconds=limit)
            channel = GlooGroup(store, rank=0, world_size=world_size, meeting=meeting, timeout_seconds=limit)
        if roll.is_over:  # nobody waits for it any more
            channel.close()
        return channel

    def _too_late(self, roll: RollCall, seats: Seats, limit: float) -> RuntimeError:
        """Return why a group has not formed within its limit."""
        for client, ranks in seats:
            if roll.missing(ranks):
                return self._absent(client, limit)
        ends = "; with NCCL, NCCL_DEBUG=INFO shows in both logs which network interfaces it uses"
        what = f"reached rank {self._group.sender}, but no group had formed after {limit:g} s{ends}"
        if len(seats) == 1:
            return EngineError(seats[0][0].engine, f"cannot join a transfer group: its workers have {what}")
        return RuntimeError(f"the workers of {', '.join(client.engine.name for client, _ in seats)} have {what}")

    def _absent(self, client: EngineClient, limit: float) -> EngineError:
        return EngineError(
            client.engine,
            f"answers, but its workers have not reached rank {self._group.sender} at {self._group.host}:"
            f"{self._group.port} within {limit:g} s, to join the transfer group: does a network policy or a firewall "
            "keep the pod from this port, or does its engine hang? The end of its log shows which",
        )


async def _within(limit: float, work: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(limit):
        return await work
