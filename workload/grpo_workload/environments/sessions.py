"""All tools and environments of a rank, in their processes: `base.Sessions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig
from grpo_workload.data.tool_schemas import COLUMN, ToolSchemas, environment_of
from grpo_workload.environments.pool import Pool
from grpo_workload.environments.program_session import ProgramSession
from grpo_workload.environments.session import EpisodeSession
from grpo_workload.environments.zygote import allow_open_files
from grpo_workload.ranks.loop_thread import LoopThread


class ProcessSessions:
    """The processes of this rank. Sessions that are open use one event loop."""

    def __init__(self, config: TrainerConfig, environ: Mapping[str, str], *, wants_reward: bool) -> None:
        """Start the processes, which import users' modules; `ready` waits for that.

        They end with the calling thread.

        Args:
            config: the job, with tools or environments.
            environ: the rank's variables.
            wants_reward: whether a reward is `environment`: sessions end with `get_reward`.

        Raises:
            ConfigError: a variable in an entry's `env` is not set.
        """
        self._wants_reward = wants_reward
        self.wants_state = False
        """Whether sessions end with the pickled state. Set it where users' rewards read `environments`."""
        self._tools: list[Pool] = []
        self._environments: dict[str, Pool] = {}
        allow_open_files()
        try:
            for tool in config.tools:
                self._tools.append(Pool(tool, environ))
            for environment in config.environments:
                self._environments[environment.name] = Pool(environment, environ)
        except ConfigError:
            self.close()
            raise

    def ready(self) -> None:
        """Wait until all modules are imported, and an environment of each kind was made.

        Raises:
            ConfigError: this cannot be done, a tool cannot be described, or two have one name; names the fields.
            EnvironmentLostError: a process ended, took more than IMPORT_SECONDS, or lost a connection.
        """
        thread = LoopThread("begin of tools and environments")
        try:
            for pool in self._pools():
                thread.run(pool.ready())  # all of them import meanwhile
            for name in self._environments or (None,):
                self._by_name(name)
            self._check_rewards()
        except BaseException:
            self.close()
            raise
        finally:
            thread.close()

    @property
    def schemas(self) -> ToolSchemas:
        """The tools of all rows as JSON schemas, once all are ready."""
        return ToolSchemas(
            tools=[schema for pool in self._tools for schema in pool.schemas],
            environments={name: list(pool.schemas) for name, pool in self._environments.items()},
        )

    def open(self, columns: Mapping[str, Any], seed: int) -> EpisodeSession | ProgramSession:
        """Return a new session for an episode of a row.

        Args:
            columns: the row, arguments of `reset` or a program's `row`; with `prompt`, as in TRL.
            seed: 62 bits, of the random numbers of its processes.

        Raises:
            ConfigError: the row chooses no environment of the job.
        """
        chosen = self._chosen(columns)
        is_choice = len(self._environments) > 1
        row = {name: value for name, value in columns.items() if not (is_choice and name == COLUMN)}
        environment = None if chosen is None else self._environments[chosen]
        if environment is not None and environment.is_program:
            return ProgramSession(environment, row, seed)
        return EpisodeSession(
            self._by_name(chosen),
            environment,
            row,
            seed,
            wants_reward=self._wants_reward,
            wants_state=self.wants_state,
        )

    def close(self) -> None:
        """End all processes. Sessions are closed before."""
        for pool in self._pools():
            pool.close()

    def _pools(self) -> list[Pool]:
        return [*self._tools, *self._environments.values()]

    def _chosen(self, columns: Mapping[str, Any]) -> str | None:
        """Return the environment of a row; None in a job without any."""
        known = self._environments
        if (name := environment_of(columns, known)) is None and known:
            given = columns.get(COLUMN)
            what = f"`{COLUMN}` of a row is {given!r}" if COLUMN in columns else f"a row has no column `{COLUMN}`"
            raise ConfigError(f"environments: {what}; it must be one of {', '.join(known)}, the names of environments")
        return name

    def _by_name(self, environment: str | None) -> dict[str, Pool]:
        """Return the tools of a row by name. ConfigError if two have one."""
        found: dict[str, Pool] = {}
        for pool in [*self._tools, *([self._environments[environment]] if environment is not None else [])]:
            for schema in pool.schemas:
                name = schema["function"]["name"]
                if name in found:
                    raise ConfigError(
                        f"{found[name].field} and {pool.field}: both have a tool {name}, and a call names one of them; "
                        "rename one"
                    )
                found[name] = pool
        return found

    def _check_rewards(self) -> None:
        scored = [pool.has_reward for pool in self._environments.values()]
        if self._wants_reward and not any(scored):
            fields = ", ".join(pool.field for pool in self._environments.values())
            raise ConfigError(f"{fields}: a reward is `environment`, and no environment has a method get_reward")
