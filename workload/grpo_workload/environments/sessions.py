"""All tools and environments of a rank, in their processes: `base.Sessions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig
from grpo_workload.environments.pool import Pool
from grpo_workload.environments.session import EpisodeSession
from grpo_workload.environments.zygote import allow_open_files
from grpo_workload.ranks.loop_thread import LoopThread

COLUMN = "environment"
"""Column of the dataset that chooses an environment where there are several."""


class ProcessSessions:
    """The processes of this rank. Sessions that are open use one event loop."""

    def __init__(
        self, config: TrainerConfig, environ: Mapping[str, str], *, wants_reward: bool, wants_state: bool
    ) -> None:
        """Start the processes, which import users' modules; `ready` waits for that.

        They end with the calling thread.

        Args:
            config: the job, with tools or environments.
            environ: the rank's variables.
            wants_reward: whether a reward is `environment`: sessions end with `get_reward`.
            wants_state: whether users' rewards read `environments`: sessions end with the pickled state.

        Raises:
            ConfigError: a variable in an entry's `env` is not set.
        """
        self._wants_reward, self._wants_state = wants_reward, wants_state
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
            thread.close(_nothing)

    def schemas(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the tools of a row as JSON schemas. ConfigError if the row chooses no environment of the job."""
        environment = self._of(columns)
        pools = [*self._tools, *([environment] if environment else [])]
        return [schema for pool in pools for schema in pool.schemas]

    def open(self, columns: Mapping[str, Any], seed: int) -> EpisodeSession:
        """Return a new session for an episode of a row.

        Args:
            columns: the row, `reset`'s arguments; with `prompt`, as in TRL.
            seed: 62 bits, of the random numbers of its processes.

        Raises:
            ConfigError: the row chooses no environment of the job.
        """
        environment = self._of(columns)
        chosen = next((name for name, pool in self._environments.items() if pool is environment), None)
        is_choice = len(self._environments) > 1
        return EpisodeSession(
            self._by_name(chosen),
            environment,
            {name: value for name, value in columns.items() if not (is_choice and name == COLUMN)},
            seed,
            wants_reward=self._wants_reward,
            wants_state=self._wants_state,
        )

    def close(self) -> None:
        """End all processes. Sessions are closed before."""
        for pool in self._pools():
            pool.close()

    def _pools(self) -> list[Pool]:
        return [*self._tools, *self._environments.values()]

    def _of(self, columns: Mapping[str, Any]) -> Pool | None:
        known = self._environments
        if len(known) < 2:
            return next(iter(known.values()), None)
        if (name := columns.get(COLUMN)) in known:
            return known[str(name)]
        what = f"`{COLUMN}` of a row is {name!r}" if COLUMN in columns else f"a row has no column `{COLUMN}`"
        raise ConfigError(f"environments: {what}; it must be one of {', '.join(known)}, the names of environments")

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


async def _nothing() -> None:
    """Nothing is left to be done in the thread."""
