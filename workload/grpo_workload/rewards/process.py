"""A reward function in its own process, with limits on time and memory: the rank's side. `worker` is the other side.

Users' code does not run in the rank, where it would have the rank's credentials, memory and time. A process is not
restarted: if a user's function fails, the rank fails, and `failurePolicy` decides what happens.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_spec.errors import ConfigError
from grpo_spec.rewards import RewardConfig
from grpo_spec.schema import in_bytes
from grpo_workload.rewards import worker
from grpo_workload.rewards.sandbox import passed_environment
from grpo_workload.rewards.scorer import RewardError
from grpo_workload.rewards.trl_signature import ENVIRONMENTS, JsonScalar, Logged, ReturnedError, Values
from grpo_workload.rewards.worker import LENGTH, Call, Check, Orders

logger = logging.getLogger(__name__)

IMPORT_SECONDS = 300.0
_DYING_SECONDS = 2.0
_STACK_LINES = 8
_MAX_REPLY = 1 << 28  # bytes: about three million completions
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from grpo_workload.rewards.worker import main
main({replies}, {stacks}, {parent})
"""


class _Reply(BaseModel):
    """The values that a call returned and logged. The function can write to the process's socket, so it is checked."""

    model_config = ConfigDict(strict=True)
    values: list[float | None]
    metrics: dict[str, list[float]]
    extra: dict[str, list[JsonScalar]]


class RewardProcess:
    """The process of one reward on one rank."""

    def __init__(self, config: RewardConfig, environ: Mapping[str, str], *, ends_with_thread: bool = True) -> None:
        """Start the process, which then imports the function; `ready` waits for that.

        Args:
            config: the reward, with `function` or `factory`.
            environ: the rank's variables.
            ends_with_thread: the kernel kills the process when the calling thread ends, even in the middle of a call.
                Otherwise it ends with the rank as soon as it is not in a call.

        Raises:
            ConfigError: a variable in the reward's `env` is not set.
        """
        assert config.code is not None
        self._name, self._memory_limit, self._function = config.name, config.memory_limit, config.code
        self._logged = Logged()
        if missing := [name for name in config.env if name not in environ]:
            raise ConfigError(
                f"rewards[{config.name}].env: {missing[0]} is not set in the trainer's pods; set it in "
                "podTemplate.env, or envFrom"
            )
        passed = passed_environment(environ, config.env)
        self._socket, theirs = socket.socketpair()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        parent = os.getpid() if ends_with_thread else None
        program = _PROGRAM.format(path=sys.path, replies=theirs.fileno(), stacks=self._stacks.fileno(), parent=parent)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                env=passed,
                pass_fds=(theirs.fileno(), self._stacks.fileno()),
                process_group=0,
            )
        orders = Orders(
            field=f"rewards[{config.name}].{'factory' if config.factory else 'function'}",
            path=config.code,
            params=config.params,
            is_factory=config.factory is not None,
            memory_bytes=in_bytes(config.memory_limit),
            withheld=tuple(sorted(environ.keys() - passed.keys())),
        )
        self._orders = pickle.dumps(orders)
        self.has_answered = False  # whether a call has returned values

    def ready(self) -> None:
        """Wait until the function is imported.

        Raises:
            ConfigError: the function cannot be imported; names the field.
            RewardError: the process ended, or did not import the function within IMPORT_SECONDS.
        """
        reply = self._ask(self._orders, IMPORT_SECONDS, f"while it imported {self._function}")
        if "error" in reply:
            self.close()
            raise ConfigError(f"{reply['error']}{self._about_memory(reply)}")
        if not reply.get("isolated"):
            logger.warning(
                "rewards[%s]: this kernel has no Landlock, so the function can read the rank's variables and memory in "
                "/proc",
                self._name,
            )

    def check(self, columns: Sequence[str], *, has_environments: bool = False) -> bool:
        """Return whether the function reads environments, given whether the job has any.

        Raises:
            ConfigError: the function cannot be called for rows with these columns; with the line to write.
        """
        check = Check(columns=tuple(columns), has_environments=has_environments)
        reply = self._ask(pickle.dumps(check), IMPORT_SECONDS, "while its arguments were read")
        if misfit := reply.get("misfit"):
            raise ConfigError(misfit)
        return bool(reply.get(ENVIRONMENTS))

    def call(
        self,
        arguments: Mapping[str, Any],
        timeout_seconds: float,
        seed: int = 0,
        states: Sequence[bytes | None] | None = None,
    ) -> Values:
        """Call the function, and return its values: floats and None.

        Blocks for `timeout_seconds` plus a few seconds at most. Random numbers that the function draws depend on `seed`
        (32 bits). `states` are those of environments, for a function that reads them.

        Raises:
            ReturnedError: the function returned something other than numbers and None, or too many or too few.
            RewardError: the function raised, took too long, ran out of memory, or ended its process.
        """
        count = len(arguments["completions"])
        reply = self._ask(self._pickled(arguments, seed, states), timeout_seconds, f"with {count} completions")
        if "returned" in reply:
            completion = reply.get("completion")
            raise ReturnedError(str(reply["returned"]), completion if completion in range(count) else None)
        if "error" in reply:
            raise RewardError(f"rewards[{self._name}] {reply['error']}{self._about_memory(reply)}")
        try:
            checked = _Reply.model_validate(reply)
        except ValidationError as error:
            raise RewardError(
                f"rewards[{self._name}]: its process sent an invalid reply; the function must not write to file "
                "descriptors that it did not open"
            ) from error
        self.has_answered = True
        self._logged = Logged(count, checked.metrics, checked.extra)
        return checked.values

    def take_logged(self) -> Logged:
        """Return what the function logged in the last call, once."""
        logged, self._logged = self._logged, Logged()
        return logged

    def close(self) -> None:
        """Kill the process and all processes that it started."""
        if self._stacks.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        self._stacks.close()

    def _pickled(self, arguments: Mapping[str, Any], seed: int, states: Sequence[bytes | None] | None) -> bytes:
        try:
            return pickle.dumps(Call(arguments=arguments, seed=seed, states=states))
        except Exception as error:  # whatever the objects raise
            column = next((name for name in arguments if not _pickles(arguments[name])), "prompts")
            raise RewardError(
                f"rewards[{self._name}]: column {column} cannot be sent to the reward's process "
                f"({type(error).__name__}: {error}); let dataset.preprocess remove it or turn it into text"
            ) from error

    def _ask(self, message: bytes, timeout_seconds: float, doing: str) -> dict[str, Any]:
        """Send a message and return the reply; empty if it is invalid. `doing` completes the error message."""
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
                f"rewards[{self._name}] was not done {doing} within {timeout_seconds:g} s: does it wait for something "
                f"that never comes? If it needs longer, raise its timeoutSeconds{self._last_stack()}"
            ) from error
        except (EOFError, ConnectionError) as error:
            raise RewardError(
                f"rewards[{self._name}]: its process {self._end()} {doing}{self._last_stack()}"
            ) from error
        except ValueError:
            return {}
        return reply if isinstance(reply, dict) else {}

    def _about_memory(self, reply: Mapping[str, Any]) -> str:
        if not reply.get("memory"):
            return ""
        return f"; its memoryLimit is {self._memory_limit}: raise it, or use less memory at a time"

    def _end(self) -> str:
        """Say how the process ended, after it has closed its socket."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_DYING_SECONDS)
            if code == -signal.SIGKILL:
                hint = "probably the pod ran out of memory: raise podTemplate.resources.limits.memory"
                return f"was killed by SIGKILL ({hint})"
            if code < 0:
                hint = f"a library that cannot get memory also ends this way: memoryLimit is {self._memory_limit}"
                return f"was killed by {signal.Signals(-code).name} ({hint})"
            return f"ended with exit code {code}"
        return "closed its connection"

    def _last_stack(self) -> str:
        """End the process, and return the stack of its main thread, to append to a message; empty if there is none."""
        # On SIGABRT faulthandler writes the stack, even if the function holds Python's global lock (GIL).
        self._process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_SECONDS)
        self._stacks.seek(0)
        dump = self._stacks.read(1 << 16).decode(errors="replace")
        self.close()
        own = re.search(r"^Current thread .*\n((?:  File .*\n?)+)", dump, re.MULTILINE)
        frames = [line for line in own[1].splitlines() if str(worker.__file__) not in line] if own else []
        return "\n".join(["; it was at", *frames[:_STACK_LINES]]) if frames else ""


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
