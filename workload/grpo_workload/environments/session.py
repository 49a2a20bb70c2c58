"""One episode's tools and environment: `base.Session` on the processes of `pool`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from grpo_workload.environments.base import EpisodeTimeoutError, SessionRequest, ToolCall, ToolResult
from grpo_workload.environments.channel import Reply
from grpo_workload.environments.child_handle import ChildHandle
from grpo_workload.environments.pool import Pool
from grpo_workload.environments.requests import Finish, Invoke, Reset
from grpo_workload.environments.results import as_error
from grpo_workload.ranks.seeds import sample_seed


class EpisodeSession:
    """Acts on processes of this machine."""

    wait_seconds = 0.0  # as many processes are forked as there are episodes

    def __init__(self, tools: Mapping[str, Pool], environment: Pool | None, request: SessionRequest) -> None:
        """Take what a session acts on.

        Args:
            tools: by name, those of the row's environment too.
            environment: None for a job with tools alone.
            request: the rest.
        """
        self._tools, self._environment, self._request = tools, environment, request
        self._child: ChildHandle | None = None  # that holds the environment
        self._num_calls = 0

    async def reset(self) -> str:
        """Begin the episode: see `base.Session.reset`."""
        if self._environment is None:
            return ""
        self._child = await self._environment.take()
        request = Reset(row=self._request.row, seed=self._seed_of(0))
        return (await self._ask_environment(request, "in reset"))[0].text

    async def call(self, calls: Sequence[ToolCall], seconds: float) -> list[ToolResult]:
        """Make the calls of one turn, those of the environment in order, all others side by side: see `base.Session`.

        A call that has begun may take its own time, also when `seconds` are over: the episode can be scored then.
        """
        deadline = time.monotonic() + seconds
        of_environment: list[tuple[int, ToolCall, int]] = []
        results: list[ToolResult | None] = [None] * len(calls)
        tasks: list[asyncio.Task[None]] = []

        async def act(position: int, call: ToolCall, number: int) -> None:
            results[position] = await self._call(call, number, deadline)

        async def act_in_order() -> None:
            for one in of_environment:
                await act(*one)

        for position, call in enumerate(calls):
            self._num_calls += 1
            if self._tools.get(call.name) is self._environment:  # also if both are None: such a call takes no time
                of_environment.append((position, call, self._num_calls))
            else:
                tasks.append(asyncio.ensure_future(act(position, call, self._num_calls)))
        tasks.append(asyncio.ensure_future(act_in_order()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # each gives its process back
        return [result for result in results if result is not None]

    async def end(self) -> tuple[float | None, bytes | None]:
        """Return reward and state: see `base.Session.end`."""
        if self._environment is None:
            return None, None
        wants_reward, wants_state = self._request.wants_reward, self._request.wants_state
        if not (wants_reward or wants_state):
            return None, None
        request = Finish(wants_reward=wants_reward, wants_state=wants_state)
        reply, state = await self._ask_environment(request, "in get_reward")
        self._environment.tell_left_out(reply.left_out)
        return reply.reward if wants_reward else None, state if wants_state else None

    async def close(self) -> None:
        """Give the environment back; one that does something still is killed."""
        if self._environment is not None and self._child is not None:
            child, self._child = self._child, None
            self._environment.put(child)

    async def _call(self, call: ToolCall, number: int, deadline: float) -> ToolResult:
        if (pool := self._tools.get(call.name)) is None:
            return _failed(f"Tool {call.name} not found.")
        if call.arguments is None:
            return _failed(f"The arguments of {call.name} must be a JSON object.")
        if pool is self._environment:
            # Not seeded: its random numbers continue from reset.
            assert self._child is not None, "a session is reset first"
            reply = await self._ask(pool, self._child, call, None, deadline)
        else:
            child = await _before(deadline, pool)
            try:
                reply = await self._ask(pool, child, call, self._seed_of(number), deadline)
            finally:
                pool.put(child)
        return ToolResult(content=reply.text, is_failed=reply.is_failed)

    async def _ask(self, pool: Pool, child: ChildHandle, call: ToolCall, seed: int | None, deadline: float) -> Reply:
        if deadline <= time.monotonic():
            raise EpisodeTimeoutError
        assert call.arguments is not None
        request = Invoke(name=call.name, arguments=call.arguments, seed=seed)
        return (await child.ask(request, pool.timeout_seconds, f"in {call.name}"))[0]

    async def _ask_environment(self, request: Reset | Finish, doing: str) -> tuple[Reply, bytes]:
        assert self._environment is not None
        assert self._child is not None
        return await self._child.ask(request, self._environment.timeout_seconds, doing)

    def _seed_of(self, number: int) -> int:
        return sample_seed(self._request.seed, number, 0) % 2**32


def _failed(message: str) -> ToolResult:
    return ToolResult(content=as_error(message), is_failed=True)


async def _before(deadline: float, pool: Pool) -> ChildHandle:
    """Take a child; it may wait until another call has ended. Raises EpisodeTimeoutError if that takes too long."""
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await pool.take()
    except TimeoutError as error:
        raise EpisodeTimeoutError from error
