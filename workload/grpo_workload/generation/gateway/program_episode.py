"""One episode that a program plays: its requests are answered one at a time, and its time is limited."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from grpo_workload.environments.base import EnvironmentLostError, Program
from grpo_workload.environments.requests import Endpoint
from grpo_workload.generation.episode_draft import Ask, Turn
from grpo_workload.generation.gateway.conversation import Answer, Conversation
from grpo_workload.generation.gateway.refusal import EPISODE_TIMEOUT, OVER, RefusalError
from grpo_workload.generation.gateway.request import ChatRequest
from grpo_workload.generation.gateway.responses import Kept

_LOOK_SECONDS = 1.0

Sample = Callable[[Ask], Awaitable[Turn]]
"""Samples a turn to its end, however long that takes."""


class ProgramEpisode:
    """Stands between the gateway and a conversation; used in one event loop."""

    def __init__(self, conversation: Conversation, sample: Sample, seconds: float, *, seed: int, number: int) -> None:
        """Take what an episode needs.

        Args:
            conversation: that has not begun.
            sample: asks the engine.
            seconds: how long the program may take, without the model.
            seed: the prompt's.
            number: of the episode among those of its prompt.
        """
        self._conversation, self._sample, self._seconds = conversation, sample, seconds
        self._seed, self._number = seed, number
        self._turns: list[asyncio.Task[Answer]] = []  # of requests that were taken
        self._by_sent: dict[bytes, asyncio.Task[Answer]] = {}  # by what was sent, the last of them
        self._turn_lock = asyncio.Lock()
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._began = time.monotonic()  # the program's present turn
        self._spent = 0.0  # by the program in its turns before
        self._refusal: RefusalError | None = None  # the last
        self.responses: Kept = {}
        """For the Responses API."""
        self.is_over = False
        """Whether a request was refused for lack of tokens or time, and none was answered since."""

    @property
    def spent_seconds(self) -> float:
        """Time that the program has taken, without the model."""
        return self._spent + (0.0 if self._is_asked else time.monotonic() - self._began)

    async def answer(self, request: ChatRequest, sent: bytes, *, is_repeated: bool) -> Answer:
        """Return the model's turn, after those of requests that came before.

        Args:
            request: the request.
            sent: the bytes that it was sent as.
            is_repeated: whether the client says that it has sent them before, and has got no answer.

        Raises:
            RefusalError: it gets none; see `Conversation.ask`.
        """
        key = hashlib.sha256(sent).digest()
        turn = self._by_sent.get(key) if is_repeated else None
        if turn is None:
            turn = self._by_sent[key] = asyncio.ensure_future(self._turn(request))
            self._turns.append(turn)
        try:
            return await asyncio.shield(turn)
        except RefusalError as error:
            self._refused(error)
            raise
        except Exception as error:
            self._fail(error)
            raise

    async def play(self, program: Program, endpoint: Endpoint, moved: Callable[[], None]) -> float | None:
        """Run the program to its end, and return its reward.

        Raises:
            EnvironmentLostError: the program failed, took too long, or asked nothing.
            Exception: as the model's turns do.
        """
        await program.begin()
        self._began = time.monotonic()
        running = asyncio.ensure_future(program.run(endpoint))
        try:
            while not (running.done() or self._failure.done()):
                watched: set[asyncio.Future[Any]] = {running, self._failure}
                await asyncio.wait(watched, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if self._is_asked or running.done():
                    continue
                moved()  # it has a limit of its own: nobody need take the rank for stuck
                if time.monotonic() - self._began > program.timeout_seconds:
                    running.cancel()
                    await asyncio.wait({running})
                    raise await program.late()
            if self._failure.done():
                raise self._failure.result()
            return self._reward(running)
        finally:
            for task in (running, *self._turns):
                task.cancel()
            await asyncio.gather(running, *self._turns, return_exceptions=True)

    @property
    def _is_asked(self) -> bool:
        """Whether the model is asked now."""
        return self._turn_lock.locked()

    async def _turn(self, request: ChatRequest) -> Answer:
        async with self._turn_lock:  # one after the other, so that each has seeds of its own
            spent = self._spent + time.monotonic() - self._began
            if spent >= self._seconds:
                text = f"the episode is over: its program has taken {self._seconds:g} s (episodes.timeoutSeconds)"
                raise RefusalError(text, code=EPISODE_TIMEOUT)
            ask = self._conversation.ask(request, self._seed, self._number)
            self._spent = spent
            try:
                answer = self._conversation.add(await self._sample(ask))
            finally:
                self._began = time.monotonic()
            self.is_over = False  # the program has made its history shorter
            return answer

    def _reward(self, running: asyncio.Future[float | None]) -> float | None:
        try:
            reward = running.result()
        except EnvironmentLostError as error:
            # No room or time was left, and the program raised what it was told: the policy's own end.
            if error.cause == "program" and self.is_over and self._conversation.num_turns:
                return None
            raise
        if not self._conversation.num_turns:
            why = f": {self._refusal}" if self._refusal else ""
            raise EnvironmentLostError("program", f"the program ended without an answer of the model{why}")
        return reward

    def _refused(self, error: RefusalError) -> None:
        self._refusal = error
        self.is_over = self.is_over or error.code in OVER

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_result(error)
