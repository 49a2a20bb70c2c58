"""One episode's session on an environment pod: `base.Session`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from grpo_spec.trainer import TrainerConfig
from grpo_workload.environments.base import EnvironmentLostError, SessionRequest, ToolCall, ToolResult
from grpo_workload.environments.pods.choice import Pod
from grpo_workload.environments.pods.link import Link, LinkLostError
from grpo_workload.environments.pods.messages import Answer, Call, End, OneCall, Reset
from grpo_workload.environments.user_process import IMPORT_SECONDS
from grpo_workload.ranks.loop_thread import LoopThread

MARGIN_SECONDS = 30.0
"""Time for an answer beyond the limits that the pod keeps: its transfer, with a state of 64 MiB."""

Connect = Callable[[SessionRequest], Awaitable[tuple[Pod, Link]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest times of requests by the pod's own limits, in seconds."""

    environment: float  # one call
    any_call: float  # one call of what takes longest

    @staticmethod
    def of(config: TrainerConfig, environment: str | None) -> Limits:
        """Return those of a row with this environment."""
        own = next((float(one.timeout_seconds) for one in config.environments if one.name == environment), 0.0)
        return Limits(own, max([own, *(float(tool.timeout_seconds) for tool in config.tools)]))


class PodSession:
    """Acts on a pod. Its connection lives in another thread, whose event loop answers pings at any time."""

    def __init__(
        self,
        thread: LoopThread,
        connect: Connect,
        freed: Callable[[], None],
        limits: Limits,
        request: SessionRequest,
    ) -> None:
        """Ask for nothing yet.

        Args:
            thread: that of all connections.
            connect: opens a session on a pod that has room, and waits for one.
            freed: is called, in the thread, when the session is closed.
            limits: those of the pod.
            request: what to open.
        """
        self._thread, self._connect, self._freed = thread, connect, freed
        self._limits, self._request = limits, request
        self._pod: Pod | None = None
        self._link: Link | None = None
        self._since = 0.0  # when it was opened, on the monotonic clock
        self._is_lost = False
        self.wait_seconds = 0.0
        """See `base.Session.wait_seconds`."""

    async def reset(self) -> str:
        """Begin the episode: see `base.Session.reset`. Waits until a pod has room."""
        return await self._thread.hand_over(self._reset())

    async def call(self, calls: Sequence[ToolCall], seconds: float) -> list[ToolResult]:
        """Make the calls of one turn: see `base.Session.call`."""
        if not calls:
            return []
        arguments = [None if call.arguments is None else dict(call.arguments) for call in calls]
        made = [OneCall(name=call.name, arguments=given) for call, given in zip(calls, arguments, strict=True)]
        request = Call(calls=made, seconds=seconds)
        # The last call may begin as the seconds end.
        answers = await self._ask(request, len(made), max(seconds, 0.0) + self._limits.any_call, "in a call")
        return [ToolResult(content=answer.text, is_failed=answer.is_failed) for answer, _ in answers]

    async def end(self) -> tuple[float | None, bytes | None]:
        """Return reward and state: see `base.Session.end`."""
        asked = self._request
        if asked.environment is None or not (asked.wants_reward or asked.wants_state):
            return None, None  # a pod that is away costs no episode then
        ((answer, behind),) = await self._ask(End(), 1, self._limits.environment, "in get_reward")
        return answer.reward, behind if answer.has_state else None

    async def close(self) -> None:
        """Close the connection, with which the session ends in the pod."""
        await self._thread.hand_over(self._close())

    async def _reset(self) -> str:
        begun = time.monotonic()
        try:
            self._pod, self._link = await self._connect(self._request)
        finally:
            self._since = time.monotonic()
            self.wait_seconds = self._since - begun
        # It may have to wait until the process has begun.
        limit = IMPORT_SECONDS + self._limits.environment
        ((answer, _),) = await self._exchange(Reset(), 1, limit, "in reset")
        return answer.text

    async def _ask(self, request: Call | End, count: int, seconds: float, doing: str) -> list[tuple[Answer, bytes]]:
        return await self._thread.hand_over(self._exchange(request, count, seconds, doing))

    async def _exchange(
        self, request: Reset | Call | End, count: int, seconds: float, doing: str
    ) -> list[tuple[Answer, bytes]]:
        assert self._pod is not None, "a session is reset first"
        assert self._link is not None
        try:
            return await self._link.ask(request, count, seconds + MARGIN_SECONDS)
        except LinkLostError as error:
            self._is_lost = True
            self._pod.failed(str(error), self._since, time.monotonic())
            text = f"environmentPods.groups[{self._pod.group}]: {self._pod.address} was lost {doing}: it {error}"
            raise EnvironmentLostError("connection", text) from error
        except EnvironmentLostError as error:
            raise EnvironmentLostError(error.cause, f"{error} (on {self._pod.address})") from error

    async def _close(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        assert self._pod is not None
        try:
            await link.close()
        finally:
            self._pod.closed(None if self._is_lost else self._since)
            self._freed()
