"""A user's reward function in a process of its own, held to limits of time and memory: the rank's side. See `reward_worker`, `sandbox`.

A rank does not run code that it does not know, for whoever runs in it has its credentials, its memory and its time. The process is started
once and never again: where it fails, the rank does, and `failurePolicy` decides.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from grpo_workload.inputs import RewardConfig
from grpo_workload.reward_worker import LENGTH, Orders, Values
from grpo_workload.sandbox import passed_environment
from grpo_workload.section import in_bytes

logger = logging.getLogger(__name__)

IMPORT_SECONDS = 300.0
_DYING_SECONDS = 2.0
_STACK_LINES = 8
_MAX_REPLY = 1 << 28  # bytes; three million completions of a call
_PROGRAM = "import sys; sys.path[:] = {path!r}; from grpo_workload.reward_worker import main; main({replies}, {stacks}, {parent})"


class RewardError(Exception):
    """A reward function failed; the message names the reward."""


class RewardProcess:
    """The process of one reward on one rank."""

    def __init__(self, config: RewardConfig, environ: Mapping[str, str]) -> None:
        """Start it, and let it import the function; `ready` waits for that. It ends with the thread that calls this.

        Raises:
            ValueError: a variable that the reward asks for is not set.
        """
        assert config.function is not None
        self._name, self._memory_limit, self._what = config.name, config.memory_limit, config.function
        if missing := [name for name in config.env if name not in environ]:
            raise ValueError(
                f"rewards[{config.name}].env: {missing[0]} is not set in the trainer's pods; set it in podTemplate.env, or envFrom"
            )
        passed = passed_environment(environ, config.env)
        self._socket, theirs = socket.socketpair()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        program = _PROGRAM.format(path=sys.path, replies=theirs.fileno(), stacks=self._stacks.fileno(), parent=os.getpid())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                env=passed,
                pass_fds=(theirs.fileno(), self._stacks.fileno()),
                process_group=0,
            )
        orders = Orders(
            field=f"rewards[{config.name}].function",
            path=config.function,
            memory_bytes=in_bytes(config.memory_limit),
            withheld=tuple(sorted(environ.keys() - passed.keys())),
        )
        self._orders = pickle.dumps(orders)

    def ready(self) -> None:
        """Wait until the function is imported.

        Raises:
            ValueError: it cannot be; names the field.
            RewardError: the process ended, or was not done within IMPORT_SECONDS.
        """
        reply = self._ask(self._orders, IMPORT_SECONDS, f"while it imported {self._what}")
        if "error" in reply:
            self.close()
            raise ValueError(f"{reply['error']}{self._about_memory(reply)}")
        if not reply.get("isolated"):
            logger.warning(
                "rewards[%s]: this kernel has no Landlock, so that the function can read the rank's variables and memory in /proc",
                self._name,
            )

    def call(self, arguments: Mapping[str, Any], timeout_seconds: float) -> Values:
        """The values of one call, floats and None as the function returned them. Blocks, never longer than the limit and a little.

        Raises:
            RewardError: the function raised, took too long, ran out of memory, returned what are no numbers, or ended its process.
        """
        count = len(arguments["completions"])
        reply = self._ask(self._pickled(arguments), timeout_seconds, f"with {count} completions")
        if "error" in reply:
            raise RewardError(f"rewards[{self._name}] {reply['error']}{self._about_memory(reply)}")
        values = reply.get("values")
        if not isinstance(values, list) or not all(value is None or isinstance(value, float) for value in values):
            raise RewardError(
                f"rewards[{self._name}]: its process sent what is no reply; it must leave file descriptors alone that are not its own"
            )
        return values

    def close(self) -> None:
        """End the process and those that it started."""
        if self._stacks.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        self._stacks.close()

    def _pickled(self, arguments: Mapping[str, Any]) -> bytes:
        try:
            return pickle.dumps(arguments)
        except Exception as error:  # pickle raises what the objects do
            column = next((name for name in arguments if not _pickles(arguments[name])), "prompts")
            raise RewardError(
                f"rewards[{self._name}]: column {column} cannot be given to the reward's process ({type(error).__name__}: {error}); have "
                "dataset.preprocess leave it out, or make it text"
            ) from error

    def _ask(self, message: bytes, timeout_seconds: float, doing: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        try:
            self._socket.settimeout(timeout_seconds)
            self._socket.sendall(LENGTH.pack(len(message)) + message)
            line = bytearray()
            while not line.endswith(b"\n"):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not (chunk := self._socket.recv(1 << 20)):
                    raise EOFError
                line += chunk
                if len(line) > _MAX_REPLY:
                    return {}
            reply = json.loads(line)
        except TimeoutError as error:
            raise RewardError(
                f"rewards[{self._name}] was not done {doing} within {timeout_seconds:g} s: does it wait for something that never comes? If "
                f"it needs longer, raise its timeoutSeconds{self._last_words()}"
            ) from error
        except (EOFError, ConnectionError) as error:
            raise RewardError(f"rewards[{self._name}]: its process {self._end()} {doing}{self._last_words()}") from error
        except ValueError:
            return {}
        return reply if isinstance(reply, dict) else {}

    def _about_memory(self, reply: Mapping[str, Any]) -> str:
        if not reply.get("memory"):
            return ""
        return f"; its memoryLimit is {self._memory_limit}: raise it, or let the function hold less at a time"

    def _end(self) -> str:
        """How the process ended, which has closed its socket."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_DYING_SECONDS)
            if code == -signal.SIGKILL:
                return "was killed by SIGKILL (probably the pod ran out of memory: raise podTemplate.resources.limits.memory)"
            if code < 0:
                hint = f"a library that cannot get memory ends so too: memoryLimit is {self._memory_limit}"
                return f"was killed by {signal.Signals(-code).name} ({hint})"
            return f"ended with exit code {code}"
        return "closed its connection"

    def _last_words(self) -> str:
        """End the process, and tell where its main thread was."""
        self._process.send_signal(signal.SIGABRT)  # faulthandler writes the stack, also of a function that keeps Python's lock
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_SECONDS)
        self._stacks.seek(0)
        dump = self._stacks.read(1 << 16).decode(errors="replace")
        self.close()
        own = re.search(r"^Current thread .*\n((?:  File .*\n?)+)", dump, re.MULTILINE)
        frames = [line for line in own[1].splitlines() if "reward_worker.py" not in line] if own else []
        return "\n".join(["; it was at", *frames[:_STACK_LINES]]) if frames else ""


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
