"""Requests of the rank to the process of a tool or environment (`zygote`), and to its children (`child`): pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_STATE = 64 << 20
"""Most bytes of an environment's state."""


Kind = Literal["function", "factory", "program"]
"""Kind of a user's function, as its field is named: a tool, a maker of tools, or one that asks the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The first request to a zygote: what to import, and within which limits."""

    entry: str  # the job's entry, for messages: tools[m:multiply]
    path: str  # module:function
    kind: Kind
    params: Mapping[str, Any]  # keyword arguments of a factory
    memory_bytes: int
    memory_limit: str  # as the user wrote it
    withheld: tuple[str, ...]  # names of variables that the rank has and this process has not

    @property
    def field(self) -> str:
        """The field that names the function."""
        return f"{self.entry}.{self.kind}"

    @property
    def whose(self) -> str:
        """Its owner, for messages."""
        return "the tool's" if self.kind == "function" else "the environment's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A request to a zygote for a child; its socket comes with it."""

    number: int
    describes: bool  # whether the child's first reply has the schemas of its tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A request to a zygote to end a child; how it ended is the last line of the child's socket."""

    number: int
    with_stack: bool = False  # with the stack of its main thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """A request to an environment to begin an episode."""

    row: bytes  # the pickled arguments of `reset`
    seed: int  # of Python's, numpy's and torch's random numbers, 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoke:
    """A request to call a tool."""

    name: str
    arguments: Mapping[str, Any]
    seed: int | None  # as of Reset; None: random numbers continue


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A request to score an environment, and to tell its state."""

    wants_reward: bool
    wants_state: bool


LOOPBACK = "127.0.0.1"
"""Address at which programs reach the rank, without a proxy that they may have for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address at which a program reaches the model, by OpenAI's protocol."""

    base_url: str
    api_key: str  # of one episode
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """A request to a program to play an episode."""

    row: bytes  # pickled
    seed: int  # as of Reset
    endpoint: Endpoint
