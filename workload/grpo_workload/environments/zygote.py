"""The process of one tool or environment: imports the user's module once, and forks a child for each that acts at once.

Children begin in milliseconds and share the memory of what was imported. A child that hangs is killed alone. The
zygote waits for their ends, and says to the rank, in the last line of a child's socket, how it ended.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from grpo_spec.errors import ConfigError
from grpo_workload.data.user_code import import_function
from grpo_workload.environments import child, sandbox, user_worker
from grpo_workload.environments.endings import DYING_SECONDS, how_it_ended, last_stack
from grpo_workload.environments.requests import Fork, Kill, Orders
from grpo_workload.environments.user_worker import LENGTH, enter

_LOOK_SECONDS = 1.0  # a signal that a module of the user takes for itself wakes nobody


def main(replies: int, stacks: int, parent: int | None) -> None:
    """Fork and end children until the rank closes the socket; the arguments are those of `user_worker.enter`."""
    control = enter(replies, stacks, parent)
    message, _ = _receive(control)
    orders = pickle.loads(message)
    assert isinstance(orders, Orders)
    allow_open_files()
    isolated = sandbox.isolate()
    sandbox.limit_memory(orders.memory_bytes)
    refused, function = None, None
    try:
        function = import_function(orders.field, orders.path)
    except ConfigError as error:
        refused = user_worker.message_of(error, orders.withheld, orders.whose)
        if isinstance(error.__cause__, MemoryError):
            refused += f"; its memoryLimit is {orders.memory_limit}: raise it, or use less memory at a time"
    gc.freeze()  # what children share: the garbage collector would write to it
    zygote = _Zygote(control, orders, isolated, function, refused)
    signal.signal(signal.SIGTERM, zygote.stop)
    if parent is not None:  # the import may hang; from here on, it has what children started to end too
        sandbox.end_with_parent(parent, signal.SIGTERM)
    zygote.serve()


def allow_open_files() -> None:
    """Raise the limit of open files to what this process may set: each child takes one or two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(slots=True)
class _Child:
    pid: int
    connection: socket.socket  # for how it ended
    stacks: IO[bytes]
    dies_at: float | None = None  # when it must have ended, on the monotonic clock


class _Zygote:
    def __init__(
        self,
        control: socket.socket,
        orders: Orders,
        isolated: bool,
        function: Callable[..., Any] | None,
        refused: str | None,
    ) -> None:
        self._control, self._orders, self._isolated = control, orders, isolated
        self._function, self._refused = function, refused
        self._children: dict[int, _Child] = {}
        self._is_over = False
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wakes, False)

    def stop(self, *_: object) -> None:
        self._is_over = True

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while not self._is_over:
            ready = [descriptor for descriptor, _ in poll.poll(1000 * self._patience())]
            with suppress(BlockingIOError):
                os.read(self._woken, 1 << 16)
            if self._control.fileno() in ready:
                try:
                    message, connection = _receive(self._control)
                except (EOFError, ConnectionError):
                    break
                self._obey(pickle.loads(message), connection)
            self._bury()
        for one in self._children.values():
            _kill_group(one.pid)
        for one in self._children.values():
            os.waitpid(one.pid, 0)

    def _obey(self, request: Fork | Kill, connection: socket.socket | None) -> None:
        if isinstance(request, Fork):
            assert connection is not None
            self._fork(request, connection)
        elif (one := self._children.get(request.number)) and one.dies_at is None:
            one.dies_at = time.monotonic() + (DYING_SECONDS if request.with_stack else 0.0)
            # On SIGABRT faulthandler writes the stack, even if the function holds Python's global lock (GIL).
            os.kill(one.pid, signal.SIGABRT if request.with_stack else signal.SIGKILL)

    def _fork(self, request: Fork, connection: socket.socket) -> None:
        if self._refused is not None:
            _say(connection, {"number": 0, "refused": self._refused})
            return
        sys.stdout.flush()
        zygote = os.getpid()
        try:
            stacks = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the child is buried
            pid = os.fork()
        except OSError as error:
            _say(connection, {"number": 0, "ended": f"could not be started: {error}"})
            return
        if pid == 0:
            try:
                with suppress(ConnectionError):  # the rank does not wait for it any more
                    self._be_a_child(request, connection, stacks, zygote)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        with suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        self._children[request.number] = _Child(pid, connection, stacks)

    def _be_a_child(self, request: Fork, connection: socket.socket, stacks: IO[bytes], zygote: int) -> None:
        os.setpgid(0, 0)
        sandbox.end_with_parent(zygote)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.enable(file=stacks)
        for other in self._children.values():
            other.connection.close()
            other.stacks.close()
        self._control.close()
        os.close(self._woken)
        os.close(self._wakes)
        assert self._function is not None
        child.serve(connection, self._function, self._orders, request, self._isolated)
        for output in (sys.stdout, sys.stderr):
            output.flush()
        os._exit(0)

    def _bury(self) -> None:
        """Kill those that should have ended, and say of those that did how."""
        for number, one in list(self._children.items()):
            if one.dies_at is not None and time.monotonic() >= one.dies_at:
                _kill_group(one.pid)
            # It stays a zombie until its group is killed: no other process gets its number before.
            if os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(one.pid)
            code = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
            one.stacks.seek(0)
            stack = last_stack(one.stacks.read(1 << 16))
            one.stacks.close()
            _say(one.connection, {"number": 0, "ended": how_it_ended(code, self._orders.memory_limit), "stack": stack})
            del self._children[number]

    def _patience(self) -> float:
        """Return for how many seconds there is nothing to do, if nothing comes."""
        return 0.02 if any(one.dies_at is not None for one in self._children.values()) else _LOOK_SECONDS


def _receive(control: socket.socket) -> tuple[bytes, socket.socket | None]:
    """Return the next request, and the socket that came with it. EOFError when the rank has closed its own."""
    header, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, 1)
    if len(header) < LENGTH.size:
        raise EOFError
    message = bytearray()
    while len(message) < (size := LENGTH.unpack(header)[0]):
        if not (part := control.recv(size - len(message))):
            raise EOFError
        message += part
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return bytes(message), socket.socket(fileno=descriptors[0]) if descriptors else None


def _say(connection: socket.socket, content: dict[str, Any]) -> None:
    """Send the last line of a child's socket; the child may have left a part of a line."""
    with connection, suppress(OSError):  # nobody may be there any more, or nobody reads what the child has sent
        connection.settimeout(0)
        connection.sendall(b"\n" + json.dumps(content).encode() + b"\n")


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
