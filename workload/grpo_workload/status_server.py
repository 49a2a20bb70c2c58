"""What a launcher tells over HTTP: its identity to its peers, its progress to the operator, metrics to Prometheus.

The launcher answers, not the ranks: they may be stuck in a collective.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from grpo_workload.collector import TrainingCollector
from grpo_workload.contract import Outcome, Progress
from grpo_workload.history import FILES, MAX_ROWS, read_history
from grpo_workload.peers import Ended, Identity
from grpo_workload.progress import read_phases, read_progress
from grpo_workload.world import Place

STORAGE_SECONDS = 5
"""How long GET /history waits for the run's folder: the claim may be on a file server that hangs."""
ENDED_MESSAGE_CHARS = 1000  # a peer puts it into its own outcome, beside what it has to say itself


@dataclass(slots=True)
class Status:
    """The launcher's state. `missing` is the gate's: pods not reached, each with the cause."""

    place: Place
    phase: str = "Starting"
    ready: bool = False
    missing: dict[str, str] = field(default_factory=dict)
    since: float = field(default_factory=time.time)  # of the phase, seconds since the epoch
    outcome: Outcome | None = None
    ended_at: float = 0.0
    recorded: bool = False  # the outcome is final

    def enter(self, phase: str, *, ready: bool = False) -> None:
        """Begin a phase."""
        self.phase, self.ready, self.since = phase, ready, time.time()

    def end(self, outcome: Outcome, *, at: float | None = None, recorded: bool = False) -> None:
        """Tell everybody how this pod ended, at the time `at` (seconds since the epoch; as told before, or now, when None)."""
        self.enter(outcome.reason)
        self.outcome, self.recorded = outcome, recorded
        self.ended_at = at or self.ended_at or self.since

    def identity(self) -> Identity:
        """Who this launcher is, and how it ended if it did."""
        ended = self.outcome and Ended(
            reason=self.outcome.reason,
            exit_code=self.outcome.exit_code,
            message=self.outcome.message[:ENDED_MESSAGE_CHARS],
            seconds_ago=time.time() - self.ended_at,
            recorded=self.recorded,
        )
        return Identity(pod=self.place.member.pod, pod_uid=self.place.pod_uid, epoch=self.place.contract.epoch, ended=ended)

    def progress(self) -> Progress:
        """Rank 0's progress on its pod, else the phase of this pod and its age; and the phases of this pod's ranks."""
        rank_phases = read_phases(self.place.state_dir, self.place.ranks)
        written = read_progress(self.place.state_dir)
        if written is None:
            waiting_for = tuple(f"{pod}: {cause}" for pod, cause in self.missing.items())
            return Progress(phase=self.phase, age_seconds=time.time() - self.since, waiting_for=waiting_for, rank_phases=rank_phases)
        return written.model_copy(update={"rank_phases": rank_phases} | ({"phase": self.phase} if self.outcome else {}))


def application(status: Status) -> web.Application:
    """GET /identity, /healthz, /readyz, /progress, /metrics, /history.

    /history?after=STEP&limit=ROWS&of=metrics,ranks,completions: `history.read_history` of rank 0's pod, with the epoch: in another one,
    steps may have been taken anew.
    """
    registry = CollectorRegistry()
    registry.register(TrainingCollector(status.place, is_ready=lambda: status.ready, has_ended=lambda: status.outcome is not None))

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

    # A thread of its own: one that hangs on the storage is missing to nobody else.
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")

    async def history(request: web.Request) -> web.Response:
        place, query = status.place, request.query
        if not place.is_master:
            return web.Response(status=404, text=f"the history is on the pod of rank 0, {place.contract.master.pod}\n")
        try:
            after, limit = int(query.get("after", -1)), int(query.get("limit", MAX_ROWS))
            files = query["of"].split(",") if "of" in query else FILES
            reading = partial(read_history, place.run_dir, after=after, limit=limit, files=files)
            rows = await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(reader, reading), STORAGE_SECONDS)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        except OSError as error:  # TimeoutError is one
            return web.Response(status=503, text=f"the run's folder {place.run_dir} does not answer: {error!r}\n")
        return web.json_response({"epoch": place.contract.epoch} | rows)

    app = web.Application()
    handlers = (identity, healthz, readyz, progress, metrics, history)
    app.add_routes([web.get(f"/{handler.__name__}", handler) for handler in handlers])
    return app


@asynccontextmanager
async def serving(status: Status) -> AsyncIterator[None]:
    """Serve `status` on the member's port while the context is open. Raises OSError when the port is taken."""
    runner = web.AppRunner(application(status), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=status.place.member.status_port).start()
        yield
    finally:
        await runner.cleanup()
