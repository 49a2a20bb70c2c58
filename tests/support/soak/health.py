"""The memory and time of the operator's process, their growth, and lines that its log must not have."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from support.control_plane import audit
from support.control_plane.operators import Operator


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Memory and time of the operator while all jobs are at rest."""

    pid: int
    descriptors: int
    connections: int  # established ones: one for each watch, and those kept for requests
    watches: int  # those that the API server serves
    threads: int
    rss: float  # MiB
    series: int  # lines of /metrics
    ghosts: int  # jobs in its metrics that no longer exist
    objects: int  # objects in etcd that are not of an existing job, without events and leases


BOUNDS = {
    # A connection that nothing uses is closed after 15 s, so at rest there is one for each watch.
    "descriptors": 1,
    "connections": 1,
    "watches": 0,
    "threads": 2,  # the executor that resolves host names starts up to 6 when they are needed
    # The allocator gives memory back in arenas of 1 MiB, and how many passes run at once varies.
    "rss": 16.0,
    # The first restart of a reason, and the first request of a kind, verb and code, add their lines.
    "series": 60,
    "ghosts": 0,
    "objects": 4,  # the control plane's own
}
"""The distance that the least of the last third may be above the most of the first third."""

FEWEST = 6
"""Fewer samples are compared in their watches and ghosts only: the others rise until every kind of work was done."""


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Return what grew over the samples of the operator's last process."""
    own = [sample for sample in samples if sample.pid == samples[-1].pid]
    third = max(1, len(own) // 3)
    found = []
    for what, bound in BOUNDS.items():
        before = max(getattr(one, what) for one in own[:third])
        after = min(getattr(one, what) for one in own[-third:])
        if after - before > bound and (len(own) >= FEWEST or what in ("watches", "ghosts")):
            found.append(f"{what} grew from {before} to {after}")
    return found


def measure(operator: Operator, seconds: float, **others: int) -> Sample:
    """Return the least that the operator uses within so many seconds, with what was measured otherwise."""
    process = psutil.Process(operator.pid)
    found: dict[str, list[float]] = {}
    deadline = time.monotonic() + seconds
    while not found or time.monotonic() < deadline:
        established = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
        values = {
            "descriptors": process.num_fds(),
            "connections": len(established),
            "threads": process.num_threads(),
            "rss": round(process.memory_info().rss / 2**20, 1),
            "series": metrics(operator).count("\n"),
        }
        for what, value in values.items():
            found.setdefault(what, []).append(value)
        time.sleep(0.5)
    least = {what: min(values) for what, values in found.items()}
    return Sample(pid=process.pid, **others, **least)


def count_watches(log: Path, user: str, since: str) -> int:
    """Return how many watches of a user are open, from the audit log of an API server that started at `since`."""
    opened = set()
    for event in audit.requests(log, user):
        if event["verb"] == "watch" and event["stageTimestamp"] > since:
            (opened.add if event["stage"] == "ResponseStarted" else opened.discard)(event["auditID"])
    return len(opened)


def metrics(operator: Operator) -> str:
    """Return the text of the operator's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def count_jobs(operator: Operator) -> int:
    """Return the number of jobs in the operator's metrics."""
    counts = re.findall(r"^grpo_operator_jobs{.*} (\S+)$", metrics(operator), re.MULTILINE)
    return round(sum(map(float, counts)))


def count_lists(operator: Operator) -> Counter[str]:
    """Return how often the operator's process has listed a kind, by reason: expired says that a watch got a 410."""
    counts: Counter[str] = Counter()
    found = re.findall(r'^grpo_operator_mirror_lists_total{.*reason="(\w+)".*} (\S+)$', metrics(operator), re.MULTILINE)
    for reason, count in found:
        counts[reason] += round(float(count))
    return counts


def is_idle(operator: Operator) -> bool:
    """Whether no pass of the operator runs or waits for its turn."""
    try:
        found = metrics(operator)
    except OSError:  # it has just been started again
        return False
    gauges = re.findall(r"^grpo_operator_workqueue_(?:active|depth) (\S+)$", found, re.MULTILINE)
    return [float(value) for value in gauges] == [0.0, 0.0]


def objects_of_no_job(keys: Collection[str], jobs: Collection[str]) -> list[str]:
    """Return the keys in etcd that are neither of these jobs nor come and go by themselves."""
    found = []
    for key in keys:
        kind, name = key.split("/")[2], key.rpartition("/")[2]
        if kind not in ("events", "leases", "masterleases", "minions", "peerserverleases") and not any(
            name == job or name.startswith(f"{job}-") for job in jobs
        ):
            found.append(key)
    return found


_TEMPORARY = (
    r"(aiohttp|kubernetes)\S*: ",
    r"(ConnectionResetError|ConnectionRefusedError|OSError|TimeoutError|asyncio\.\S*TimeoutError)\b",
    r"grpo_operator\S*\.(ForbiddenError|NotLeadingError): ",
)
"""Exceptions that the faults cause, by the last line of the traceback.

The API server is away, answers with 429 or 5xx, or knows no roles yet as it starts; the Lease is lost.
"""


def odd_errors(log: Path) -> list[str]:
    """Return the exceptions in the operator's log that no fault of the soak explains."""
    return [line for line in _exceptions(log) if not re.match("|".join(_TEMPORARY), line)]


def _exceptions(log: Path) -> Iterator[str]:
    """Yield the line that ends each traceback, and what asyncio complains about.

    What was the direct cause of another exception does not count: a deadline, say, cancels what a request was doing.
    """
    within, ended = False, ""
    with log.open(errors="replace") as lines:
        for line in lines:
            if ended and line.strip():
                if not line.startswith("The above exception was the direct cause"):
                    yield ended
                ended = ""
            if re.search(r"never retrieved|never awaited|Unclosed|Fatal error|Task was destroyed", line):
                yield line.strip()
            if line.startswith("Traceback"):
                within = True
            elif within and not line.startswith((" ", "\n")):
                within, ended = False, line.strip()
    if ended:
        yield ended


def as_rows(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """Return samples for a file."""
    return [asdict(sample) for sample in samples]
