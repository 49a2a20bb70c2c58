"""The processes of one tool or environment, the rank's side: a zygote, and its children, which are used again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from grpo_spec.environments import EnvironmentConfig, ToolConfig
from grpo_spec.errors import ConfigError
from grpo_spec.schema import in_bytes
from grpo_workload.environments import zygote
from grpo_workload.environments.base import EnvironmentLostError
from grpo_workload.environments.child_handle import ChildHandle, Zygote
from grpo_workload.environments.endings import DYING_SECONDS
from grpo_workload.environments.requests import Kind, Orders
from grpo_workload.environments.user_process import UserProcess
from grpo_workload.environments.user_worker import LENGTH

logger = logging.getLogger(__name__)

MAX_TOOL_CHILDREN = 64
"""Calls of one tool that run at a time; others wait."""
_MAX_IDLE = 64  # an evaluation may have had thousands of episodes at once
_MAX_STARTS = 64
"""Children that a process forks at a time: so many requests wait before one to kill a child, which has a limit."""


class Pool:
    """The zygote of one entry of the job, and its children. Its coroutines run in one event loop."""

    def __init__(self, config: ToolConfig | EnvironmentConfig, environ: Mapping[str, str]) -> None:
        """Start the zygote, which then imports the user's module; `ready` waits for that.

        Raises:
            ConfigError: a variable in the entry's `env` is not set.
        """
        self._config, self._environ = config, environ
        self.timeout_seconds = float(config.timeout_seconds)  # of one call
        self.schemas: list[dict[str, Any]] = []  # of the tools, once `ready`
        self.has_reward = False  # whether objects have get_reward
        is_environment = isinstance(config, EnvironmentConfig)
        self._places = None if is_environment else asyncio.Semaphore(MAX_TOOL_CHILDREN)
        self._starts = asyncio.Semaphore(_MAX_STARTS)
        self._numbers = itertools.count()
        self._idle: list[ChildHandle] = []
        self._told: set[str] = set()
        self._zygote = self._start()
        self._first: ChildHandle | None = ChildHandle(self._zygote, next(self._numbers), describes=True)

    @property
    def is_program(self) -> bool:
        """Whether it asks the model itself."""
        return self._zygote.orders.kind == "program"

    @property
    def field(self) -> str:
        """The field that names the user's function."""
        return self._zygote.orders.field

    async def ready(self) -> None:
        """Wait until the module is imported and its tools are described, of an environment by an object of it.

        Raises:
            ConfigError: this cannot be done; names the field.
            EnvironmentLostError: the process ended, took more than IMPORT_SECONDS, or lost a connection.
        """
        assert self._first is not None
        try:
            hello = await self._first.hello()
        except EnvironmentLostError as error:
            if error.cause == "reset":  # the factory raised
                raise ConfigError(str(error)) from error
            raise
        if not hello.isolated:
            logger.warning(
                "%s: this kernel has no Landlock, so it can read the rank's variables and memory in /proc", self.field
            )
        self.schemas, self.has_reward = hello.schemas, hello.has_reward
        self._idle.append(self._first)
        self._first = None

    async def take(self) -> ChildHandle:
        """Return a child that waits for a request; `put` gives it back. Raises EnvironmentLostError, as `ready`."""
        if self._places:
            await self._places.acquire()
        try:
            while self._idle:
                child = self._idle.pop()
                if child.is_quiet():
                    return child
                child.drop()
            async with self._starts:
                return await self._new()
        except BaseException:
            if self._places:
                self._places.release()
            raise

    def put(self, child: ChildHandle) -> None:
        """Give a child back: another session uses it, unless it failed, does something still, or enough are idle."""
        if child.is_idle and len(self._idle) < _MAX_IDLE:
            self._idle.append(child)
        else:
            child.drop()
        if self._places:
            self._places.release()

    def tell_left_out(self, attributes: Mapping[str, str]) -> None:
        """Log once which attributes the state lacks, and why."""
        for name, why in attributes.items():
            if name not in self._told:
                self._told.add(name)
                logger.warning("%s: rewards do not see the attribute %s of its objects: %s", self.field, name, why)

    def close(self) -> None:
        """End all processes."""
        self._zygote.process.stop(DYING_SECONDS if self._zygote.has_served else 0)
        for child in [*self._idle, *([self._first] if self._first else [])]:
            child.drop()
        self._idle.clear()

    async def _new(self) -> ChildHandle:
        process = self._zygote.process
        if self._zygote.has_served and process.process.poll() is not None:  # one that never served would end again
            logger.warning("%s: its process %s; another is started", self.field, process.end())
            process.close()
            self._zygote = self._start()
        child = ChildHandle(self._zygote, next(self._numbers), describes=False)
        try:
            await child.hello()
        except BaseException:
            child.drop()
            raise
        return child

    def _start(self) -> Zygote:
        config = self._config
        if isinstance(config, EnvironmentConfig):
            entry, path, params = f"environments[{config.name}]", config.code, config.params
            kind: Kind = "factory" if config.factory else "program"
        else:
            entry, path, params, kind = f"tools[{config.function}]", config.function, {}, "function"
        process = UserProcess(
            zygote,
            self._environ,
            config.env,
            field=entry,
            memory_limit=config.memory_limit,
            # Sets of texts have the same order in each process: an episode that begins again sees the same.
            variables={"PYTHONHASHSEED": "0"},
        )
        orders = Orders(
            entry=entry,
            path=path,
            kind=kind,
            params=params,
            memory_bytes=in_bytes(config.memory_limit),
            memory_limit=config.memory_limit,
            withheld=process.withheld,
        )
        message = pickle.dumps(orders)
        with suppress(OSError):  # it has ended: its first child says so
            process.socket.sendall(LENGTH.pack(len(message)) + message)
        process.socket.setblocking(False)  # a zygote that hangs must not hold up the rank
        return Zygote(orders, process)
