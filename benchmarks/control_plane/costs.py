"""The cost of each request that a new job needs: processor time of every program, while nothing else happens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

from kubernetes.aio import client, config

from benchmarks.control_plane.client import AT_ONCE, Manifest
from benchmarks.control_plane.manifests import grpojob, job_name, planned
from benchmarks.control_plane.scenarios import FOUR
from benchmarks.control_plane.turn import CANARY, QUIET, Raw, Turn
from grpo_operator.api import names
from grpo_operator.api.names import PATHS
from grpo_operator.layout.manifests import manifests
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.transport import Transport, connect

PODS = "pods"
"""Name of what is no request: the pods of a job, from the scale-up of its StatefulSets until all are ready."""


def costs(turn: Turn, count: int) -> Raw:
    """Send each request for so many jobs with the operator's own client, and return milliseconds for one of each kind.

    Kinds have the names that `counted` gives them. The operator only watches: another controller manages these jobs.
    """
    return {"jobs": count, "shape": FOUR, "costs": asyncio.run(_costs(turn, count))}


async def _costs(turn: Turn, count: int) -> dict[str, dict[str, float]]:
    configuration = client.Configuration()
    await config.load_kube_config(str(turn.nodes.release.kubeconfig), client_configuration=configuration)
    cluster = Cluster(Transport(connect(configuration), Instruments()))
    try:
        return await _Costs(turn, cluster, count).measure()
    finally:
        await cluster.close()


class _Costs:
    def __init__(self, turn: Turn, cluster: Cluster, count: int) -> None:
        self._turn, self._cluster = turn, cluster
        self._jobs: dict[str, Manifest] = {job_name(number): {} for number in range(count)}
        self._children: dict[str, list[Manifest]] = {}

    async def measure(self) -> dict[str, dict[str, float]]:
        running = (await self._read(CANARY))["status"]
        begun = running | {"phase": "Pending", "members": []}
        found = {"create grpojobs": await self._cost(self._create)}
        found["list services"] = await self._cost(self._each("Service", self._cluster.check_owner))
        found["list networkpolicies"] = await self._cost(self._each("NetworkPolicy", self._cluster.check_owner))
        dry_run = self._each("StatefulSet", lambda one: self._cluster.try_apply(one, is_ours=False))
        found["create dry-run statefulsets"] = await self._cost(dry_run, of_each=2)
        first = await self._cost(lambda name: self._write(name, begun))
        found["create configmaps"] = await self._cost(self._each("ConfigMap", self._cluster.create))
        for kind in ("Service", "NetworkPolicy"):
            found[f"create {_plural(kind)}"] = await self._cost(self._each(kind, self._cluster.create))
        statefulsets = self._each("StatefulSet", self._cluster.create)
        found["create statefulsets"] = await self._cost(statefulsets, of_each=2)
        found[PODS] = await self._cost(self._scale_up, until=self._are_ready)
        second = await self._cost(lambda name: self._write(name, running))
        found["update grpojobs"] = {program: round((first[program] + second[program]) / 2, 2) for program in first}
        found["create events"] = await self._cost(self._emit)
        return found

    async def _cost(
        self, send: Callable[[str], Awaitable[object]], of_each: int = 1, until: Callable[[], bool] = lambda: True
    ) -> dict[str, float]:
        """Return the milliseconds of one request; `of_each`: how many of them `send` makes for a job."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(name: str) -> None:
            async with slots:
                await send(name)

        await self._settle()
        before = self._turn.cpu()
        await asyncio.gather(*map(one, self._jobs))
        await asyncio.to_thread(self._turn.wait, until, "pods are ready")
        await self._settle()
        after, requests = self._turn.cpu(), len(self._jobs) * of_each
        return {program: round(1000 * (after[program] - before[program]) / requests, 2) for program in before}

    async def _settle(self) -> None:
        """Wait until these programs are quiet, whatever else this machine does."""
        quiet, before = 0, sum(self._turn.cpu().values())
        while quiet < 3:
            await asyncio.sleep(0.4)
            now = sum(self._turn.cpu().values())
            quiet, before = quiet + 1 if now - before < QUIET * 0.4 else 0, now

    async def _read(self, name: str) -> Manifest:
        found = await self._cluster.get(names.KIND, self._turn.namespace, name)
        assert found is not None
        return found

    async def _create(self, name: str) -> None:
        (made,) = grpojob(name, FOUR)
        made["spec"]["managedBy"] = "example.com/benchmark"
        path = PATHS[names.KIND].format(self._turn.namespace)
        raw = await asyncio.to_thread(self._turn.api.request, "POST", path, made)
        job, topology = planned(name, FOUR)
        job = replace(job, namespace=self._turn.namespace, uid=raw["metadata"]["uid"])
        self._jobs[name], self._children[name] = raw, manifests(job, topology, 0)
        for child in self._children[name]:
            if child["kind"] == "StatefulSet":
                child["spec"]["replicas"] = 0

    def _each(self, kind: str, send: Callable[[Manifest], Awaitable[object]]) -> Callable[[str], Awaitable[object]]:
        """Return the function that sends a request for each of a job's children of a kind."""

        async def all_of(name: str) -> None:
            for child in self._children[name]:
                if child["kind"] == kind:
                    await send(child)

        return all_of

    async def _write(self, name: str, status: Manifest) -> None:
        self._jobs[name] = await self._cluster.write_status(self._jobs[name], status)

    async def _emit(self, name: str) -> None:
        now = datetime.now(UTC)
        await self._cluster.emit(self._jobs[name], kind="Normal", reason="Running", message="all ready", now=now)

    async def _scale_up(self, name: str) -> None:
        for group, pods in zip("ab", FOUR, strict=True):
            whole = self._turn.namespace, "StatefulSet", f"{name}-{group}", {"spec": {"replicas": pods}}
            await asyncio.to_thread(self._turn.api.patch, *whole)

    def _are_ready(self) -> bool:
        self._turn.pods.look()
        return sum(pod.startswith("job-") for pod in self._turn.pods.ready) == len(self._jobs) * sum(FOUR)


def _plural(kind: str) -> str:
    return PATHS[kind].rpartition("/")[2]
