"""The interface between the loop of an episode and what it acts on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from grpo_workload.environments.requests import Endpoint


class EnvironmentLostError(Exception):
    """The environment of an episode failed, not the policy: the episode begins again. The message is its cause."""

    def __init__(self, cause: str, message: str) -> None:
        """`cause`: one of CAUSES; `message`: what happened, for people."""
        super().__init__(message)
        self.cause = cause


CAUSES = ("timeout", "process", "connection", "reset", "get_reward", "program")
"""Kinds of failures: a call took too long, its process ended, its connection was lost, a method of ours raised, or
a program raised or did not ask the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any] | None  # None: they are no JSON object
    text: str = ""  # the arguments as they were written


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer to a call."""

    content: str
    is_failed: bool = False  # the policy's own failure: an unknown tool, wrong arguments, or the tool raised


class Session(Protocol):
    """Tools and environment of one episode. Its coroutines run in one event loop, one at a time."""

    @property
    def wait_seconds(self) -> float:
        """Seconds that `reset` has waited for a place among the sessions of environment pods."""
        ...

    async def reset(self) -> str:
        """Begin the episode; returns text for the end of the last message, empty where there is none.

        Raises:
            EnvironmentLostError: see `call`.
        """
        ...

    async def call(self, calls: Sequence[ToolCall], seconds: float) -> list[ToolResult]:
        """Make the calls of one turn and return their results, in order; those of independent tools run side by side.

        Args:
            calls: the calls.
            seconds: how long the episode may still spend in calls.

        Raises:
            EpisodeTimeoutError: these seconds are over before a call begins.
            EnvironmentLostError: a call took longer than its own limit, or its process or connection was lost.
        """
        ...

    async def end(self) -> tuple[float | None, bytes | None]:
        """Return what `get_reward` returned and the pickled state (see `state`), each None where nobody asked for it.

        Raises:
            EnvironmentLostError: see `call`.
        """
        ...

    async def close(self) -> None:
        """Give everything back; called once, whatever happened before."""
        ...


@runtime_checkable
class Program(Protocol):
    """A user's program that runs an episode and asks the model itself; used as a session."""

    @property
    def timeout_seconds(self) -> float:
        """Longest time between two answers of the model."""
        ...

    async def begin(self) -> None:
        """Wait until the program can run, which takes nothing of its time. Raises EnvironmentLostError."""
        ...

    async def run(self, endpoint: Endpoint) -> float | None:
        """Play the episode to its end; returns the program's reward, None if it returned none.

        Raises:
            EnvironmentLostError: it raised (then the cause is "program"), or see `Session.call`.
            ConfigError: a user's mistake.
        """
        ...

    async def late(self) -> EnvironmentLostError:
        """End the program, after `run` was cancelled, and return the error that says what it did."""
        ...

    async def close(self) -> None:
        """Give everything back; called once, whatever happened before."""
        ...


class EpisodeTimeoutError(Exception):
    """An episode has spent its seconds: it ends, and is scored as it is."""


class Sessions(Protocol):
    """All tools and environments of a rank, once they are ready."""

    def open(self, columns: Mapping[str, Any], seed: int) -> Session | Program:
        """Return a new session for an episode of a row.

        Args:
            columns: the row, which `reset` or the program gets; with `prompt`, as in TRL.
            seed: 62 bits, of the random numbers of its processes; the same for all completions of a prompt.

        Raises:
            ConfigError: the row chooses no environment of the job.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """A request to a host for one session."""

    environment: str | None  # None: tools alone
    row: bytes  # pickled arguments of `reset`, or a program's row; only processes that run users' code unpickle them
    seed: int  # of the random numbers of its processes, 62 bits
    wants_reward: bool  # whether `end` calls `get_reward`, which objects have then
    wants_state: bool  # whether `end` returns the state


class EnvironmentDescription(BaseModel):
    """An environment, once an object of it was made."""

    model_config = ConfigDict(strict=True)
    schemas: list[dict[str, Any]]  # of its methods
    has_reward: bool  # whether it has `get_reward`


class Description(BaseModel):
    """Tools as JSON schemas, and environments by name."""

    model_config = ConfigDict(strict=True)
    tools: list[dict[str, Any]]
    environments: dict[str, EnvironmentDescription]


class Host(Protocol):
    """A place where sessions run: processes beside the rank, or pods."""

    async def ready(self) -> Description:
        """Wait until users' modules are imported, and an environment of each kind was made.

        Raises:
            ConfigError: this cannot be done; names the field.
            EnvironmentLostError: it takes too long, a process ended, or a connection was lost.
        """
        ...

    def begin(self, request: SessionRequest) -> Session | Program:
        """Return a new session; its `reset` is what waits for a place."""
        ...

    def close(self) -> None:
        """End everything. Sessions are closed before."""
        ...
