"""Events and their times, at little cost: the API server's audit log for pods and requests, one watch for statuses."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.control_plane.client import Api, Manifest
from benchmarks.control_plane.manifests import job_of

Event = dict[str, Any]

WRITES = ("create", "update", "patch", "delete", "deletecollection")
KWOK = b'"username":"kwok"'


class AuditLog:
    """The audit log from the moment at which this is made."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, path.stat().st_size
        self._begin = self._read

    def news(self, *words: bytes) -> list[Event]:
        """Return the events since the last call that contain all of the words."""
        with self._path.open("rb") as log:
            log.seek(self._read)
            lines = log.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self._read += sum(map(len, lines))
        return [json.loads(line) for line in lines if all(word in line for word in words)]

    def requests(self, user: str) -> list[Event]:
        """Return the user's requests from the beginning on, except watches, which stay open, and Leases."""
        with self._path.open("rb") as log:
            log.seek(self._begin)
            events = [json.loads(line) for line in log if user.encode() in line and line.endswith(b"\n")]
        return [
            event
            for event in events
            if event["user"].get("username") == user and event["verb"] != "watch" and resource(event) != "leases"
        ]


def seconds(event: Event) -> float:
    """Return when the API server answered a request, in Unix time."""
    return datetime.fromisoformat(event["stageTimestamp"]).timestamp()


def resource(event: Event) -> str:
    """Return the resource of a request."""
    return str(event.get("objectRef", {}).get("resource", event["requestURI"]))


def is_write(event: Event) -> bool:
    """Return whether a request changed something."""
    return event["verb"] in WRITES and "dryRun" not in event["requestURI"] and event["responseStatus"]["code"] < 300


def counted(events: Iterable[Event]) -> dict[str, int]:
    """Return the number of requests by verb and resource."""

    def name(event: Event) -> str:
        return f"{event['verb']}{' dry-run' if 'dryRun' in event['requestURI'] else ''} {resource(event)}"

    return dict(Counter(map(name, events)).most_common())


class Pods:
    """Times at which pods of a namespace became ready and were gone, in Unix time."""

    def __init__(self, log: Path, namespace: str) -> None:
        self._log, self._namespace = AuditLog(log), f'"namespace":"{namespace}"'.encode()
        self.ready: dict[str, float] = {}
        self.gone: dict[str, float] = {}

    def look(self) -> None:
        """Read what fake nodes did since the last call: each of them reports a pod as ready once."""
        for event in self._log.news(KWOK, self._namespace, b'"resource":"pods"'):
            about = event["objectRef"]
            if event["responseStatus"]["code"] >= 300:
                continue
            if event["verb"] == "patch" and about.get("subresource") == "status":
                self.ready[about["name"]] = seconds(event)
            elif event["verb"] == "delete":
                self.gone[about["name"]] = seconds(event)

    def are_ready(self, count: int, since: float) -> bool:
        """Look, and return whether so many pods became ready since a time."""
        self.look()
        return sum(at >= since for at in self.ready.values()) >= count

    def ready_jobs(self, since: float) -> dict[str, float]:
        """Return when the last pod of each job became ready, of those that did since a time."""
        jobs: dict[str, float] = {}
        for pod, at in self.ready.items():
            if at >= since:
                jobs[job_of(pod)] = max(at, jobs.get(job_of(pod), 0.0))
        return jobs


class Statuses:
    """Times at which the status of objects first said something, in Unix time; from one watch."""

    def __init__(self, api: Api, namespace: str, kind: str, says: Callable[[Manifest], int | None]) -> None:
        """`says` returns a number that the status says, such as the attempt that runs, or None."""
        self.first: dict[tuple[str, int], float] = {}
        self._last: dict[str, int] = {}
        self.error: Exception | None = None
        self._says, self._open = says, lambda: api.watch(namespace, kind)
        self._stream, self._closed = self._open(), False
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            while not self._closed:
                for one in self._stream:
                    if (number := self._says(one)) is not None:
                        self.first.setdefault((one["metadata"]["name"], number), time.time())
                        self._last[one["metadata"]["name"]] = number
                if not self._closed:
                    self._stream = self._open()
        except Exception as error:  # whatever it is, who waits for a status must not wait on
            self.error = error

    def numbers(self) -> dict[str, int]:
        """Return what each object said last. Raises what ended the watch."""
        if self.error:
            raise RuntimeError("the watch of statuses ended") from self.error
        return dict(self._last)

    def close(self) -> None:
        """End the watch."""
        self._closed = True
        self._stream.close()


class Processors:
    """The load of this machine's processors, by anything that runs on it."""

    def __init__(self) -> None:
        self._before = self._times()

    def busy(self) -> float:
        """Return the share of the processors' time since the last call that was not idle, from 0 to 1."""
        before, self._before = self._before, self._times()
        idle, total = (now - then for now, then in zip(self._before, before, strict=True))
        return 1 - idle / total if total else 0.0

    @staticmethod
    def _times() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)  # idle and iowait; guests' time is part of user's


def processor_seconds(pid: int | None) -> float:
    """Return the processor time that a program has taken. Raises RuntimeError if it does not run."""
    if pid is None:
        raise RuntimeError("the controller has ended; its log says why")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def samples(port: int) -> Iterator[Any]:
    """Yield the samples of the operator's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            yield from family.samples


def use(port: int) -> dict[str, float]:
    """Return the operator's memory (MiB) and the processor time that it has taken (seconds)."""
    values = {sample.name: sample.value for sample in samples(port)}
    rss, cpu = values["process_resident_memory_bytes"] / 2**20, values["process_cpu_seconds_total"]
    return {"rss": round(rss, 1), "cpu": round(cpu, 2)}
