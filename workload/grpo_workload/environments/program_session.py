"""One episode of a program that asks the model itself: `base.Program` on a process of `pool`."""

from __future__ import annotations

from grpo_workload.environments.base import EnvironmentLostError, SessionRequest
from grpo_workload.environments.child_handle import ChildHandle
from grpo_workload.environments.pool import Pool
from grpo_workload.environments.requests import Endpoint, Play
from grpo_workload.ranks.seeds import sample_seed

_DOING = "in its program, since the model's last answer"


class ProgramSession:
    """Runs the program once, in a process of this episode alone: what it leaves behind ends with it."""

    def __init__(self, pool: Pool, request: SessionRequest) -> None:
        """`request`: has the program's row, and the seed of its random numbers."""
        self._pool, self._request = pool, request
        self._child: ChildHandle | None = None

    @property
    def timeout_seconds(self) -> float:
        """Longest time of the program between two answers of the model."""
        return self._pool.timeout_seconds

    async def begin(self) -> None:
        """Wait for a process: see `base.Program.begin`."""
        self._child = await self._pool.take()

    async def run(self, endpoint: Endpoint) -> float | None:
        """Play the episode to its end: see `base.Program.run`."""
        assert self._child is not None, "it is begun first"
        request = Play(row=self._request.row, seed=sample_seed(self._request.seed, 0, 0) % 2**32, endpoint=endpoint)
        reply, _ = await self._child.ask(request, None, "in its program")
        return reply.reward

    async def late(self) -> EnvironmentLostError:
        """Kill the program, and say where it was: see `base.Program.late`."""
        if self._child is None:
            return EnvironmentLostError(
                "timeout", f"{self._pool.field}: it did not begin in {self.timeout_seconds:g} s"
            )
        return await self._child.late(self.timeout_seconds, _DOING)

    async def close(self) -> None:
        """Kill the process, whatever it does."""
        if self._child is not None:
            child, self._child = self._child, None
            child.drop()
