"""Wires the parts of an operator: mirror and watches, launchers, passes and their queue.

Events only wake the job's key in the queue. kopf_handlers.py gives it a client of the API server and the time; the
simulated operator of the tests gives it an API server in memory and virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import Context
from datetime import datetime
from typing import Any

from grpo_operator.api import names
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.metrics.jobs import WatchedJob
from grpo_operator.passes.jobs import Jobs
from grpo_operator.passes.launchers import Launchers
from grpo_operator.passes.progress_client import ProgressSource
from grpo_operator.passes.reconcile import PassOptions, Reconciler
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.health import ended_tasks, stuck_passes
from grpo_operator.runtime.kept import Key, Object
from grpo_operator.runtime.mirror import Mirror
from grpo_operator.runtime.scopes import Scope
from grpo_operator.runtime.watches import Watches
from grpo_operator.runtime.workqueue import WorkQueue


class Program:
    """The parts of one operator. Create it in the event loop that it lives in.

    `watched`: the children of jobs that it follows. `monotonic` gives seconds; only their differences matter.
    `progress` None: no launcher is ever asked.
    """

    def __init__(
        self,
        cluster: Cluster,
        watched: Iterable[Scope],
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        progress: ProgressSource | None,
        instruments: Instruments,
        options: PassOptions,
    ) -> None:
        self.instruments = instruments
        self.jobs = Jobs(monotonic, instruments)
        self.mirror = Mirror(watched, self.wake, self._pod_deleted, self._job_seen, self.jobs.forget)
        self._watches = Watches(cluster, self.mirror, instruments)
        self._launchers = Launchers(progress, self.jobs, self.wake, instruments)
        self._reconciler = Reconciler(cluster, self.mirror, self._launchers, self.jobs, clock, instruments, options)
        self._gate = asyncio.Event()
        self.queue: WorkQueue[Key] = WorkQueue(self.reconcile, instruments, gate=self._gate)
        instruments.mirror.count = self.mirror.count

    def start(self) -> None:
        """Begin to watch the children of jobs."""
        self._watches.start()

    async def synced(self) -> None:
        """Wait until the mirror lacks nothing."""
        await self.mirror.synced.wait()

    def begin(self) -> None:
        """Let passes begin, one over each job: the mirror lacks nothing, and no other operator acts."""
        self.instruments.leads()
        self._gate.set()
        for key in self.mirror.job_keys():
            self.wake(key)

    async def close(self) -> None:
        """End at once, wherever a pass is."""
        await self._watches.close()
        await self.queue.close()
        await self._launchers.close()

    def stuck(self) -> Iterator[str]:
        """Yield what only a restart helps against: watches that have ended, and passes that do not end."""
        yield from ended_tasks(self._watches.tasks)
        yield from stuck_passes(self.queue.started, asyncio.get_running_loop().time())

    def take_in(self, key: Key, event: Mapping[str, Any]) -> None:
        """Take in an event of the watch of jobs."""
        # In the caller's context, whatever waits for this job's sake would keep what kopf keeps there: the job, as
        # dictionaries (`Child.packed`).
        Context().run(self._take_in, key, event)

    def _take_in(self, key: Key, event: Mapping[str, Any]) -> None:
        if event["type"] == "DELETED":
            self.mirror.drop_job(key)
        elif not self.mirror.keep_job(event["object"]):
            return  # the operator's own write, or older: no reason for a pass
        self.wake(key)

    def wake(self, key: Key) -> None:
        """Request a pass over a job."""
        if self._gate.is_set():  # else an operator that stands by would gather passes for as long as it does
            self.queue.wake(key)

    def site_changed(self, namespace: str) -> None:
        """Request passes over the jobs of a namespace, of all if it is "": what the site sets for them has changed."""
        for key in self.mirror.job_keys():
            if namespace in ("", key.namespace):
                Context().run(self.wake, key)

    async def reconcile(self, key: Key) -> float | None:
        """Do one pass over a job, for the queue."""
        return await self._reconciler.reconcile(key)

    def _pod_deleted(self, key: Key, pod: ObservedPod) -> None:
        if pod.is_of_an_attempt:  # how others end is recorded nowhere
            self.jobs.of(key).deleted_pods.remember(pod)

    def _job_seen(self, key: Key, raw: Object) -> None:
        if (raw["spec"].get("managedBy") or names.CONTROLLER) == names.CONTROLLER:
            self.instruments.jobs.seen(key, WatchedJob.read(key.namespace, key.name, raw.get("status", {})))
