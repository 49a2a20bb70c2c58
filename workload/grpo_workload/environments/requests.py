"""What the rank asks of the process of a tool or an environment (`zygote`), and of its children (`child`): pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_STATE = 64 << 20
"""Most bytes of an environment's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The first request to a zygote: what to import, and within which limits."""

    entry: str  # the job's entry, for messages: tools[m:multiply]
    path: str  # module:function
    is_environment: bool  # it is a factory: it makes objects whose methods are tools
    params: Mapping[str, Any]  # keyword arguments of a factory
    memory_bytes: int
    memory_limit: str  # as the user wrote it
    withheld: tuple[str, ...]  # names of variables that the rank has and this process has not

    @property
    def field(self) -> str:
        """The field that names the function."""
        return f"{self.entry}.{'factory' if self.is_environment else 'function'}"


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
