"""Plans of the page's job, as `grpo plan` makes them: one for each GPU that a browser asks for, in a thread."""

from __future__ import annotations

import asyncio
from typing import Any

from grpo_cli.errors import CliError
from grpo_cli.local.planning import answer, question
from grpo_cli.screen.memory_plan import verdict
from grpo_operator.layout.job import Job
from grpo_spec.gpus import gpu_bytes

Asked = dict[str, Any]

RETRY_SECONDS = 30.0
"""Seconds after which what has failed is tried again: a model may have been missing, or its hub not reached."""


class Plans:
    """Plans by GPU. Each is made once, and again when the job's spec has changed or it has failed."""

    def __init__(self, gpu: int | None) -> None:
        self._gpu = gpu  # bytes; None: what the job's node selectors say
        self._made: dict[str, tuple[Asked, asyncio.Task[dict[str, Any]]]] = {}
        self._planner = asyncio.Lock()  # a plan takes a core for seconds: one at a time, whatever is clicked

    def answer(self, job: Job, gpu: str) -> dict[str, Any]:
        """Return the plan for a GPU by its name, empty for the job's own; `state` says what it is waiting for."""
        try:
            asked = question(job, gpu_bytes(gpu) if gpu else self._gpu)
        except ValueError as error:  # pods of this spec cannot be made
            return {"state": "failed", "error": str(error)}
        if asked is None:
            return {"state": "GPU unknown"}
        if gpu not in self._made or self._made[gpu][0] != asked:
            self._made[gpu] = asked, asyncio.create_task(self._plan(gpu, asked))
        task = self._made[gpu][1]
        return task.result() if task.done() else {"state": "pending"}

    async def _plan(self, gpu: str, asked: Asked) -> dict[str, Any]:
        try:
            async with self._planner:
                found = await asyncio.to_thread(answer, asked)
        except CliError as error:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._made.pop, gpu, None)
            return {"state": "failed", "error": error.message}
        return {"state": "made", "plan": found, "lines": list(verdict(found))}
