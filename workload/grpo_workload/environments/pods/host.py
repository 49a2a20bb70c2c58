"""The environment pods of a job, as a rank uses them: `base.Host`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from grpo_spec.contract import Contract
from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import Description, EnvironmentLostError, SessionRequest
from grpo_workload.environments.pods.choice import Pod, are_full, choose, complaint, pods_of
from grpo_workload.environments.pods.describe import describe
from grpo_workload.environments.pods.link import AwayError, Link, LinkLostError
from grpo_workload.environments.pods.messages import MAX_BEHIND, Open
from grpo_workload.environments.pods.session import Limits, PodSession
from grpo_workload.environments.user_process import IMPORT_SECONDS
from grpo_workload.environments.zygote import allow_open_files
from grpo_workload.ranks.loop_thread import LoopThread

logger = logging.getLogger(__name__)

AWAY_SECONDS = IMPORT_SECONDS + 60
"""Time that episodes wait while no pod can be used: one that begins again imports users' modules."""
FULL_SECONDS = 3600.0
"""Time that they wait while others have all sessions and none becomes free."""
_TELL_SECONDS = 60.0
_DNS_SECONDS = 5  # a pod that has begun again has another address


class PodHost:
    """Opens sessions on the pods of a job's groups. All connections are in a thread of its own."""

    def __init__(self, contract: Contract, rank: int, on_wait: Callable[[int], None] = lambda _: None) -> None:
        """Ask nobody yet. `on_wait` gets the number of episodes that wait for a session, whenever it has changed."""
        allow_open_files()  # each session has a connection
        self._contract = contract
        self._pods = pods_of(contract.environment_pods, rank)
        self._thread = LoopThread("environment pods")
        self._client = self._thread.run(_client())
        self._freed = asyncio.Event()  # a session of this rank was closed
        self._turns: dict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)  # by environment: who asks while full
        self._opened_at: dict[str | None, float] = {}  # when the last session was, by environment
        self._told_at = 0.0
        self._on_wait, self._num_waiting = on_wait, 0

    async def ready(self) -> Description:
        """See `base.Host.ready`: one pod of each group is enough."""
        return await self._thread.hand_over(describe(self._client, self._contract, self._pods))

    def begin(self, request: SessionRequest) -> PodSession:
        """See `base.Host.begin`."""
        if len(request.row) > MAX_BEHIND:
            raise ConfigError(
                f"environments[{request.environment}]: a row of the dataset has {len(request.row)} bytes, and "
                f"{MAX_BEHIND} can be sent to a pod; let dataset.preprocess remove what reset does not need"
            )
        limits = Limits.of(self._contract.config, request.environment)
        return PodSession(self._thread, self._connect, self._freed.set, limits, request)

    def close(self) -> None:
        """End all connections."""
        self._thread.close(self._client.close)

    async def _connect(self, request: SessionRequest) -> tuple[Pod, Link]:
        """Open a session on a pod that has room, and wait for one.

        Raises EnvironmentLostError if none was opened for this environment for too long.
        """
        pods = [pod for pod in self._pods if pod.serves(request.environment)]
        turn = self._turns[request.environment]
        if not turn.locked() and (found := await self._try(pods, request)):
            return found
        self._wait_for(1)
        try:
            return await self._wait(pods, request, turn)
        finally:
            self._wait_for(-1)

    def _wait_for(self, more: int) -> None:
        self._num_waiting += more
        self._on_wait(self._num_waiting)

    async def _wait(self, pods: list[Pod], request: SessionRequest, turn: asyncio.Lock) -> tuple[Pod, Link]:
        begun = time.monotonic()
        async with turn:  # one asks for all: the others would be told the same, and then be first by chance
            while True:
                self._freed.clear()
                if found := await self._try(pods, request):
                    return found
                self._check_wait(pods, max(begun, self._opened_at.get(request.environment, 0.0)))
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(max(0.05, _next_look(pods)), 1.0)):
                        await self._freed.wait()

    async def _try(self, pods: list[Pod], request: SessionRequest) -> tuple[Pod, Link] | None:
        """Ask each pod that may have room, until one opens the session."""
        tried: set[Pod] = set()
        while pod := choose(pods, tried, begun := time.monotonic()):
            tried.add(pod)
            pod.num_open += 1  # before others choose
            try:
                link = await Link.open(self._client, pod.address, self._message(request), request.row)
            except BaseException as error:
                pod.num_open -= 1
                if isinstance(error, AwayError) and error.is_full:
                    pod.full(time.monotonic())
                elif isinstance(error, AwayError | LinkLostError):
                    pod.failed(f"it {error}", begun, time.monotonic())
                else:
                    raise
                continue
            pod.opened()
            self._opened_at[request.environment] = time.monotonic()
            return pod, link
        return None

    def _message(self, request: SessionRequest) -> Open:
        return Open(
            job=self._contract.job.uid,
            environment=request.environment,
            seed=request.seed,
            wants_reward=request.wants_reward,
            wants_state=request.wants_state,
        )

    def _check_wait(self, pods: list[Pod], since: float) -> None:
        now = time.monotonic()
        text = complaint(pods, now - since)
        if now - since >= (FULL_SECONDS if are_full(pods) else AWAY_SECONDS):
            raise EnvironmentLostError("connection", text)
        if now - max(since, self._told_at) >= _TELL_SECONDS:
            self._told_at = now
            logger.warning("%s; episodes wait", text)


def _next_look(pods: list[Pod]) -> float:
    now = time.monotonic()
    return min(pod.wait(now) for pod in pods)


async def _client() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=_DNS_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
