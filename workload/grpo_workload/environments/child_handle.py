"""A child of a zygote, the rank's side: requests to it, and what is said when it fails."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import CAUSES, EnvironmentLostError
from grpo_workload.environments.channel import Channel, InvalidReplyError, Reply, is_quiet, pickled, send
from grpo_workload.environments.endings import DYING_SECONDS
from grpo_workload.environments.requests import Finish, Fork, Invoke, Kill, Orders, Play, Reset
from grpo_workload.environments.user_process import IMPORT_SECONDS, UserProcess

_REPORT_SECONDS = DYING_SECONDS + 2  # after which a zygote that says nothing hangs
_ROOM_SECONDS = 0.01  # after which a zygote's socket may have room again
_ADVICE = " If it needs longer, raise its timeoutSeconds"
_NO_FOREIGN_FILES = "must not write to file descriptors that it did not open"


@dataclass(slots=True, eq=False)
class Zygote:
    """The process that forks the children of an entry of the job."""

    orders: Orders
    process: UserProcess
    has_served: bool = False  # a child of it was ready
    _waiting: deque[tuple[Fork | Kill, socket.socket | None]] = field(default_factory=deque)  # for room in its socket
    _retries_in: asyncio.AbstractEventLoop | None = None

    def send(self, request: Fork | Kill, theirs: socket.socket | None = None) -> None:
        """Send a request, with the socket that comes with it, which is closed here; later if there is no room now.

        A process that has ended gets none: the sockets of its children close.
        """
        self._waiting.append((request, theirs))
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            request, theirs = self._waiting[0]
            try:
                send(self.process.socket, request, theirs)
            except BlockingIOError:  # it forks, which takes milliseconds
                self._flush_later()
                return
            except OSError:
                pass
            self._waiting.popleft()
            if theirs is not None:
                theirs.close()

    def _flush_later(self) -> None:
        def again() -> None:
            self._retries_in = None
            self._flush()

        with suppress(RuntimeError):  # no loop runs: everything is being closed
            if self._retries_in is not (loop := asyncio.get_running_loop()):
                self._retries_in = loop
                loop.call_later(_ROOM_SECONDS, again)


class ChildHandle:
    """A forked process that calls a tool, or holds an environment; used by one coroutine at a time."""

    def __init__(self, zygote: Zygote, number: int, *, describes: bool) -> None:
        """Ask the zygote for the child; `hello` waits for it."""
        ours, theirs = socket.socketpair()
        self.is_idle = False  # it waits for a request, and nothing has failed
        self._zygote, self._number, self._channel = zygote, number, Channel(ours)
        self._entry = zygote.orders.entry
        zygote.send(Fork(number=number, describes=describes), theirs)

    async def hello(self) -> Reply:
        """Wait until it is ready. Raises as `ask`, and ConfigError if the user's module cannot be imported."""
        doing = f"while it {'began' if self._zygote.has_served else 'imported'} {self._zygote.orders.path}"
        try:
            async with asyncio.timeout(IMPORT_SECONDS):
                reply = await self._channel.read()
        except TimeoutError as error:
            raise await self.late(IMPORT_SECONDS, doing, "") from error
        except InvalidReplyError as error:
            self.drop()
            raise self._wrote() from error
        except (EOFError, OSError) as error:
            raise await self._gone(doing) from error
        if not is_quiet(self._zygote.process.socket):  # zygotes send nothing
            raise self._wrote()
        self._check(reply, doing)
        self._zygote.has_served = self.is_idle = True
        return reply

    async def ask(
        self, request: Reset | Invoke | Finish | Play, seconds: float | None, doing: str
    ) -> tuple[Reply, bytes]:
        """Return the reply, and the bytes behind it. After an error it is not used again.

        Args:
            request: what to do.
            seconds: limit; then it is killed. None: the caller limits it, and calls `late`.
            doing: completes messages: "in reset".

        Raises:
            EnvironmentLostError: it took longer, its process ended, or the environment failed.
            ConfigError: a user's mistake.
        """
        message = pickled(request)
        self.is_idle = False
        try:
            async with asyncio.timeout(seconds):
                reply, behind = await self._channel.ask(message)
        except TimeoutError as error:
            assert seconds is not None
            raise await self.late(seconds, doing) from error
        except InvalidReplyError as error:
            await self._end()
            text = f"{self._entry}: its process sent an invalid reply {doing}; its code {_NO_FOREIGN_FILES}"
            raise EnvironmentLostError("process", text) from error
        except (EOFError, OSError) as error:
            raise await self._gone(doing) from error
        self._check(reply, doing)  # after a failure, a connection that the process keeps may be of no use any more
        self.is_idle = True
        return reply, behind

    def is_quiet(self) -> bool:
        """Whether it can be asked: it is there, and has sent nothing."""
        return self._channel.is_quiet()

    def drop(self) -> None:
        """Kill it; nobody asks how it ended."""
        self._zygote.send(Kill(number=self._number))
        self._channel.close()

    def _check(self, reply: Reply, doing: str) -> None:
        if reply.ended is not None:
            text = f"{self._entry}: its process {reply.ended} {doing}{reply.stack}"
            raise EnvironmentLostError("process", text)
        if reply.refused is not None:
            raise ConfigError(reply.refused)
        if reply.error is not None:
            cause = reply.cause if reply.cause in CAUSES else "process"
            raise EnvironmentLostError(cause, f"{self._zygote.orders.field}: {reply.error}")

    def _wrote(self) -> ConfigError:
        orders = self._zygote.orders
        return ConfigError(f"{orders.field}: {orders.path} {_NO_FOREIGN_FILES}, and wrote to one")

    async def late(self, seconds: float, doing: str, advice: str = _ADVICE) -> EnvironmentLostError:
        """Kill it, and return the error that says where it was after these seconds."""
        report = await self._end(with_stack=True)
        # Without a report the zygote itself hangs, perhaps in the import of the user's module.
        stack = report.stack if report else self._zygote.process.last_stack()
        text = f"{self._entry} was not done {doing} within {seconds:g} s: does it wait for something that never comes?"
        return EnvironmentLostError("timeout", f"{text}{advice}{stack}")

    async def _gone(self, doing: str) -> EnvironmentLostError:
        report = await self._end()
        if report and report.ended is not None:
            how, stack = report.ended, report.stack
        else:
            how = await asyncio.to_thread(self._zygote.process.end)
            stack = "" if self._zygote.has_served else self._zygote.process.last_stack()
        return EnvironmentLostError("process", f"{self._entry}: its process {how} {doing}{stack}")

    async def _end(self, *, with_stack: bool = False) -> Reply | None:
        """Kill it, and return how it ended; None if its zygote does not answer."""
        self._zygote.send(Kill(number=self._number, with_stack=with_stack))
        try:
            async with asyncio.timeout(_REPORT_SECONDS):
                return await self._channel.last()
        except TimeoutError:
            return None
        finally:
            self._channel.close()
