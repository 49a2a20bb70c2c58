"""One side's turn: its controller, a namespace of its own, and the time until its jobs are ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.control_plane.client import Api
from benchmarks.control_plane.fake_nodes import FakeNodes
from benchmarks.control_plane.manifests import Shape, job_name
from benchmarks.control_plane.observer import AuditLog, Pods, Processors, Statuses, counted, is_write, processor_seconds
from benchmarks.control_plane.sides import Side
from grpo_devcluster.progress import wait_until

Raw = dict[str, Any]

CANARY = "canary"
WAIT = 3600.0
"""Seconds after which a benchmark gives up on anything."""

OFTEN = 0.05  # seconds between looks into the audit log
QUIET = 0.25  # share of the processors that a quiet control plane takes at most


@dataclass(frozen=True)
class Turn:
    """A side whose controller runs, with a job that is ready: nothing starts up while others are measured."""

    side: Side
    api: Api
    nodes: FakeNodes
    namespace: str
    pods: Pods
    statuses: Statuses | None

    def create(self, count: int, shape: Shape) -> Raw:
        """Create jobs and wait until their pods are ready and their statuses say so; return what was measured."""
        names = [job_name(number) for number in range(count)]
        jobs = [self.side.make(name, shape) for name in names]
        total = count * sum(shape)
        with self.measured() as taken:
            begin = time.time()
            self.api.create_all(self.namespace, jobs)
            created = time.time() - begin
            self.wait(lambda: self.pods.are_ready(total, begin), f"{total} pods are ready")
            self.wait_for_statuses(names)
        ready = [at - begin for at in self.pods.ready_jobs(begin).values()]
        said = [self.statuses.first[name, 0] - begin for name in names] if self.statuses else []
        self._check(total)
        return {
            "jobs": count,
            "pods": total,
            "shape": shape,
            "seconds": {
                "created": round(created, 3),
                "ready": round(max(ready), 3),
                "status": round(max(said), 3) if said else None,
            },
            **taken,
            "raw": {"ready": rounded(ready), "status": rounded(said)},
        }

    @contextmanager
    def measured(self) -> Iterator[Raw]:
        """Yield what is filled at the end: how busy the processors were, seconds of each program, requests."""
        found: Raw = {}
        before, log, processors = self.cpu(), AuditLog(self.nodes.plane.audit_log), Processors()
        yield found
        busy, after = processors.busy(), self.cpu()
        requests = log.requests(self.side.user) if self.side.user else []
        found["busy"] = round(busy, 3)
        found["cpu"] = {program: round(after[program] - before[program], 2) for program in before}
        found["requests"] = counted(requests)
        found["writes"] = sum(map(is_write, requests))

    def wait(self, check: Callable[[], bool], what: str, interval: float = OFTEN) -> None:
        """Wait until `check` holds. Raises RuntimeError if the operator ends by itself meanwhile."""
        operator = self.nodes.operator

        def holds() -> bool:
            if operator.has_ended:
                raise RuntimeError(f"the operator has ended:\n{operator.log.read_text()[-2000:]}")
            return check()

        wait_until(holds, f"{self.side.name}: {what}", WAIT, interval)

    def wait_for_statuses(self, names: list[str]) -> None:
        """Wait until the statuses of these jobs say that they are ready."""
        if (statuses := self.statuses) is not None:
            self.wait(lambda: statuses.numbers().keys() >= set(names), "statuses say ready")

    def cpu(self) -> dict[str, float]:
        """Return the seconds of processor time that each program has taken."""
        plane = {daemon.name: processor_seconds(daemon.pid()) for daemon in self.nodes.plane.daemons()}
        return plane | {"controller": self.side.cpu(), "benchmark": time.process_time()}

    def _check(self, count: int) -> None:
        """Raise RuntimeError unless so many pods are ready now, by a list of them."""
        found = [pod for pod in self.api.items(self.namespace, "Pod") if not pod["metadata"]["name"].startswith(CANARY)]
        ready = [
            pod
            for pod in found
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
        ]
        if not len(found) == len(ready) == count:
            raise RuntimeError(f"{self.side.name}: {len(ready)} of {len(found)} pods are ready, expected {count}")


def rounded(values: list[float]) -> list[float]:
    """Return values in ascending order, in milliseconds."""
    return sorted(round(value, 3) for value in values)


@contextmanager
def turn(nodes: FakeNodes, api: Api, side: Side, namespace: str) -> Iterator[Turn]:
    """Start a side's controller and try it with one job; at the end remove everything and wait until it is gone."""
    api.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    api_path = f"/api/v1/namespaces/{namespace}"
    wait_until(lambda: api.exists(f"{api_path}/serviceaccounts/default"), "a service account", WAIT)
    side.start()
    statuses = Statuses(api, namespace, side.kind, side.says) if side.kind else None
    try:
        found = Turn(side, api, nodes, namespace, Pods(nodes.plane.audit_log, namespace), statuses)
        api.create(namespace, side.make(CANARY, (1, 3)))
        found.wait(lambda: found.pods.are_ready(4, 0.0), "the first job's pods are ready")
        found.wait_for_statuses([CANARY])
        settle()
        yield found
    finally:
        if statuses:
            statuses.close()
        side.stop()
        api.request("DELETE", api_path)
        wait_until(lambda: not api.exists(api_path), f"{namespace} is gone", WAIT, interval=0.5)
        settle()


def settle() -> None:
    """Wait until the processors are quiet for two seconds, at most half a minute: others may use this machine."""
    processors, quiet, deadline = Processors(), 0, time.monotonic() + 30
    while quiet < 4 and time.monotonic() < deadline:
        time.sleep(0.5)
        quiet = quiet + 1 if processors.busy() < QUIET else 0
