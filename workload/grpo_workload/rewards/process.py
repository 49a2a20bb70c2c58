"""A reward function in its own process, with limits on time and memory: the rank's side. `worker` is the other side.

A process is not restarted: if a user's function fails, the rank fails, and `failurePolicy` decides what happens.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_spec.errors import ConfigError
from grpo_spec.rewards import RewardConfig
from grpo_spec.schema import in_bytes
from grpo_spec.words import counted
from grpo_workload.environments.user_process import IMPORT_SECONDS, UserProcess, not_sent
from grpo_workload.environments.user_worker import LENGTH
from grpo_workload.rewards import worker
from grpo_workload.rewards.scorer import RewardError
from grpo_workload.rewards.trl_signature import ENVIRONMENTS, JsonScalar, Logged, ReturnedError, Values
from grpo_workload.rewards.worker import Call, Check, Orders

logger = logging.getLogger(__name__)

_MAX_REPLY = 1 << 28  # bytes: about three million completions


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
        self._process = UserProcess(
            worker,
            environ,
            config.env,
            field=f"rewards[{config.name}]",
            memory_limit=config.memory_limit,
            ends_with_thread=ends_with_thread,
        )
        orders = Orders(
            field=f"rewards[{config.name}].{'factory' if config.factory else 'function'}",
            path=config.code,
            params=config.params,
            is_factory=config.factory is not None,
            memory_bytes=in_bytes(config.memory_limit),
            withheld=self._process.withheld,
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
        reply = self._ask(
            self._pickled(arguments, seed, states), timeout_seconds, f"with {counted(count, 'completion')}"
        )
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
        self._process.close()

    def _pickled(self, arguments: Mapping[str, Any], seed: int, states: Sequence[bytes | None] | None) -> bytes:
        try:
            return pickle.dumps(Call(arguments=arguments, seed=seed, states=states))
        except Exception as error:  # whatever the objects raise
            why = not_sent(arguments, "prompts", "the reward's", error)
            raise RewardError(f"rewards[{self._name}]: {why}") from error

    def _ask(self, message: bytes, timeout_seconds: float, doing: str) -> dict[str, Any]:
        """Send a message and return the reply; empty if it is invalid. `doing` completes the error message."""
        deadline = time.monotonic() + timeout_seconds
        try:
            self._process.socket.settimeout(timeout_seconds)
            self._process.socket.sendall(LENGTH.pack(len(message)) + message)
            line = bytearray()
            while not line.endswith(b"\n"):
                self._process.socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not (chunk := self._process.socket.recv(1 << 20)):
                    raise EOFError
                line += chunk
                if len(line) > _MAX_REPLY:
                    return {}
            reply = json.loads(line)
        except TimeoutError as error:
            raise RewardError(
                f"rewards[{self._name}] was not done {doing} within {timeout_seconds:g} s: does it wait for something "
                f"that never comes? If it needs longer, raise its timeoutSeconds{self._process.last_stack()}"
            ) from error
        except (EOFError, ConnectionError) as error:
            raise RewardError(
                f"rewards[{self._name}]: its process {self._process.end()} {doing}{self._process.last_stack()}"
            ) from error
        except ValueError:
            return {}
        return reply if isinstance(reply, dict) else {}

    def _about_memory(self, reply: Mapping[str, Any]) -> str:
        if not reply.get("memory"):
            return ""
        return f"; its memoryLimit is {self._memory_limit}: raise it, or use less memory at a time"
