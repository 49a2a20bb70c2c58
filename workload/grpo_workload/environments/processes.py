"""All tools and environments of a job in processes of this machine: `base.Host`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grpo_spec.environments import EnvironmentConfig, ToolConfig
from grpo_spec.errors import ConfigError
from grpo_workload.environments.base import Description, EnvironmentDescription, SessionRequest
from grpo_workload.environments.pool import Pool
from grpo_workload.environments.program_session import ProgramSession
from grpo_workload.environments.session import EpisodeSession
from grpo_workload.environments.zygote import allow_open_files


class Processes:
    """The processes of a rank, or of an environment pod. Sessions that are open use one event loop."""

    def __init__(
        self, tools: Iterable[ToolConfig], environments: Iterable[EnvironmentConfig], environ: Mapping[str, str]
    ) -> None:
        """Start the processes, which import users' modules. They end with the calling thread.

        Args:
            tools: those of the job.
            environments: those of the job, or of an environment pod.
            environ: the pod's variables.

        Raises:
            ConfigError: a variable in an entry's `env` is not set.
        """
        self._tools: list[Pool] = []
        self._environments: dict[str, Pool] = {}
        allow_open_files()
        try:
            for tool in tools:
                self._tools.append(Pool(tool, environ))
            for environment in environments:
                self._environments[environment.name] = Pool(environment, environ)
        except ConfigError:
            self.close()
            raise

    async def ready(self) -> Description:
        """See `base.Host.ready`. Refuses also two tools with one name."""
        for pool in self.pools():
            await pool.ready()  # all of them import meanwhile
        for name in self._environments or (None,):
            self._by_name(name)
        return Description(
            tools=[schema for pool in self._tools for schema in pool.schemas],
            environments={
                name: EnvironmentDescription(schemas=pool.schemas, has_reward=pool.has_reward)
                for name, pool in self._environments.items()
            },
        )

    def begin(self, request: SessionRequest) -> EpisodeSession | ProgramSession:
        """See `base.Host.begin`."""
        chosen = None if request.environment is None else self._environments[request.environment]
        if chosen is not None and chosen.is_program:
            return ProgramSession(chosen, request)
        return EpisodeSession(self._by_name(request.environment), chosen, request)

    def close(self) -> None:
        """End all processes. Sessions are closed before."""
        for pool in self.pools():
            pool.close()

    def pools(self) -> list[Pool]:
        """Return those of all entries."""
        return [*self._tools, *self._environments.values()]

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
