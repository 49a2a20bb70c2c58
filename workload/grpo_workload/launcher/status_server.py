"""A launcher's HTTP servers. The launcher answers and not a rank, because ranks may be stuck in a collective.

The open one tells names and numbers: identity for its peers, progress for the operator, metrics for Prometheus. What
has texts, such as completions, is served on loopback alone, where only those who may forward the pod's ports reach it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from grpo_spec.reasons import Reason
from grpo_spec.reports import RUN_FILES, ExitCode, Outcome, Progress
from grpo_workload.launcher.identity import Ended, Identity
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.prometheus import TrainingCollector
from grpo_workload.reporting.history import MAX_ROWS, read_history
from grpo_workload.reporting.progress_files import read_idle, read_phases, read_progress, read_waiting

STORAGE_SECONDS = 5
"""Seconds that GET /history waits for the run's folder. Its volume may be on a file server that hangs."""
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class Status:
    """The state of a launcher."""

    place: Place
    phase: str = "Starting"
    ready: bool = False
    missing: dict[str, str] = field(default_factory=dict)  # pods not reached yet, each with the cause
    since: float = field(default_factory=time.time)  # start of the phase, in seconds since 1970
    outcome: Outcome | None = None
    ended_at: float = 0.0  # seconds since 1970
    is_final: bool = False  # whether the outcome is final
    raised: Callable[[], tuple[int, float] | None] = lambda: None  # `Ranks.raised` of this pod's ranks
    local_port: int = 0  # port on loopback of `local_application`; the system chooses it, as every other may be in use

    def enter(self, phase: str, *, ready: bool = False) -> None:
        """Enter a phase."""
        self.phase, self.ready, self.since = phase, ready, time.time()

    def end(self, outcome: Outcome, *, at: float | None = None, is_final: bool = False) -> None:
        """Publish how this pod ended.

        `at` is the time, in seconds since 1970; None keeps the time of an earlier call, or else means now.
        """
        self.enter(outcome.reason)
        self.outcome, self.is_final = outcome, is_final
        self.ended_at = at or self.ended_at or self.since

    def identity(self) -> Identity:
        """Return which pod this is, and how it ended if it has, or will because a rank has raised."""
        ended = None
        if self.outcome:
            ended = Ended(
                reason=self.outcome.reason,
                exit_code=self.outcome.exit_code,
                rank=self.outcome.rank,
                seconds_ago=time.time() - self.ended_at,
                is_final=self.is_final,
            )
        elif raised := self.raised():
            rank, at = raised
            ended = Ended(
                reason=Reason.RANK_FAILED,
                exit_code=ExitCode.RANK_FAILED,
                rank=rank,
                seconds_ago=time.time() - at,
                is_final=False,
            )
        place = self.place
        return Identity(
            pod=place.pod,
            pod_uid=place.pod_uid,
            attempt=place.contract.attempt,
            ended=ended,
            local_port=self.local_port,
        )

    def progress(self) -> Progress:
        """Return rank 0's progress if it is in this pod, else the pod's phase and age; with its ranks' phases."""
        rank_phases = read_phases(self.place.state_dir, self.place.ranks)
        counts = [read_waiting(self.place.state_dir, rank) for rank in self.place.ranks]
        waiting = sum(filter(None, counts)) or None
        idle = read_idle(self.place.state_dir, self.place.ranks)
        written = read_progress(self.place.state_dir)
        if written is None:
            return Progress(
                phase=self.phase,
                age_seconds=time.time() - self.since,
                idle_seconds=idle,
                waiting_for=tuple(f"{pod}: {cause}" for pod, cause in self.missing.items()),
                rank_phases=rank_phases,
            )
        now = {"rank_phases": rank_phases, "idle_seconds": idle, "waiting_episodes": waiting}
        return written.model_copy(update=now | ({"phase": self.phase} if self.outcome else {}))


def open_application(status: Status) -> web.Application:
    """GET /identity, /healthz, /readyz, /progress, /metrics: names and numbers, as everybody reaches them."""
    registry = CollectorRegistry()
    registry.register(
        TrainingCollector(status.place, is_ready=lambda: status.ready, has_ended=lambda: status.outcome is not None)
    )

    async def identity(_: web.Request) -> web.Response:
        return web.json_response(text=status.identity().model_dump_json(by_alias=True))

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(status=200 if status.ready else 503, text=f"{status.phase}\n")

    async def progress(_: web.Request) -> web.Response:
        return web.json_response(text=status.progress().model_dump_json(by_alias=True))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return _application(identity, healthz, readyz, progress, metrics)


def local_application(place: Place) -> web.Application:
    """GET /history?after=STEP&limit=ROWS&of=metrics,ranks,completions.

    It returns the rows of `history.read_history`, on rank 0's pod only, and the number of the attempt, because the next
    attempt may take some of the steps again.
    """
    # Its own thread: when it hangs on the storage, nothing else waits.
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")

    async def history(request: web.Request) -> web.Response:
        query = request.query
        if not place.is_master:
            return web.Response(status=404, text=f"the history is on the pod of rank 0, {place.contract.master.pod}\n")
        try:
            after, limit = int(query.get("after", -1)), int(query.get("limit", MAX_ROWS))
            files = query["of"].split(",") if "of" in query else RUN_FILES
            reading = partial(read_history, place.run_dir, after=after, limit=limit, files=files)
            rows = await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(reader, reading), STORAGE_SECONDS)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        except OSError as error:  # TimeoutError is one
            return web.Response(status=503, text=f"the run's folder {place.run_dir} does not answer: {error!r}\n")
        return web.json_response({"attempt": place.contract.attempt} | rows)

    return _application(history)


def _application(*handlers: Callable[[web.Request], Awaitable[web.Response]]) -> web.Application:
    """Return an application that answers GET /<name> by each handler, and nothing else."""
    app = web.Application()
    app.add_routes([web.get(f"/{handler.__name__}", handler) for handler in handlers])
    return app


@asynccontextmanager
async def serving(status: Status) -> AsyncIterator[None]:
    """Serve `status` on the member's port, and its history on loopback, while the context is open.

    Raises OSError if the member's port is taken.
    """
    async with AsyncExitStack() as stack:
        local = await _listen(stack, local_application(status.place), LOOPBACK, 0)
        status.local_port = local.addresses[0][1]
        await _listen(stack, open_application(status), None, status.place.member.status_port)
        yield


async def _listen(stack: AsyncExitStack, app: web.Application, host: str | None, port: int) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port).start()
    return runner
