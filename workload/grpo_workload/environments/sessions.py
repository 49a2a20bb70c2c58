"""All tools and environments of a rank, wherever they run: `base.Sessions`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from grpo_spec.errors import ConfigError
from grpo_spec.trainer import TrainerConfig
from grpo_workload.data.tool_schemas import COLUMN, ToolSchemas, environment_of
from grpo_workload.environments.base import Description, Host, Program, Session, SessionRequest
from grpo_workload.environments.user_process import not_sent
from grpo_workload.ranks.loop_thread import LoopThread


class RankSessions:
    """Sessions of this rank's episodes. Those that are open use one event loop."""

    def __init__(self, host: Host, config: TrainerConfig, *, wants_reward: bool) -> None:
        """Take what `ready` waits for.

        Args:
            host: where sessions run.
            config: the job, with tools or environments.
            wants_reward: whether a reward is `environment`: sessions end with `get_reward`.
        """
        self._host, self._wants_reward = host, wants_reward
        self._factories = {one.name: f"environments[{one.name}].factory" for one in config.environments}
        self.wants_state = False
        """Whether sessions end with the pickled state. Set it where users' rewards read `environments`."""
        self._description = Description(tools=[], environments={})

    def ready(self) -> None:
        """Wait until the host is ready.

        Raises:
            ConfigError: see `base.Host.ready`, or no environment has the reward that the job asks for.
            EnvironmentLostError: see `base.Host.ready`.
        """
        thread = LoopThread("begin of tools and environments")
        try:
            self._description = thread.run(self._host.ready())
            self._check_rewards()
        except BaseException:
            self.close()
            raise
        finally:
            thread.close()

    @property
    def schemas(self) -> ToolSchemas:
        """The tools of all rows as JSON schemas, once all are ready."""
        found = self._description.environments
        return ToolSchemas(
            tools=self._description.tools,
            environments={name: found[name].schemas for name in self._factories if name in found},
        )

    def open(self, columns: Mapping[str, Any], seed: int) -> Session | Program:
        """Return a new session for an episode of a row.

        Args:
            columns: the row, arguments of `reset` or a program's `row`; with `prompt`, as in TRL.
            seed: 62 bits, of the random numbers of its processes.

        Raises:
            ConfigError: the row chooses no environment of the job, or does not pickle.
        """
        chosen, is_choice = self._chosen(columns), len(self._factories) > 1
        known = None if chosen is None else self._description.environments.get(chosen)
        row = {name: value for name, value in columns.items() if not (is_choice and name == COLUMN)}
        return self._host.begin(
            SessionRequest(
                environment=chosen,
                row=b"" if chosen is None else _pickled(chosen, row),
                seed=seed,
                wants_reward=self._wants_reward and known is not None and known.has_reward,
                wants_state=self.wants_state,
            )
        )

    def close(self) -> None:
        """End the host. Sessions are closed before."""
        self._host.close()

    def _chosen(self, columns: Mapping[str, Any]) -> str | None:
        """Return the environment of a row; None in a job without any."""
        known = self._factories
        if (name := environment_of(columns, known)) is None and known:
            given = columns.get(COLUMN)
            what = f"`{COLUMN}` of a row is {given!r}" if COLUMN in columns else f"a row has no column `{COLUMN}`"
            raise ConfigError(f"environments: {what}; it must be one of {', '.join(known)}, the names of environments")
        return name

    def _check_rewards(self) -> None:
        has_reward = any(one.has_reward for one in self._description.environments.values())
        if self._wants_reward and not has_reward:
            fields = ", ".join(self._factories.values())
            raise ConfigError(f"{fields}: a reward is `environment`, and no environment has a method get_reward")


def _pickled(environment: str, row: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(row)
    except Exception as error:  # whatever the objects raise
        why = not_sent(row, "prompt", "the environment's", error)
        raise ConfigError(f"environments[{environment}]: {why}") from error
