"""Many jobs at once: time until each has its children and its restart, and the operator's cost, busy and at rest.

A real API server, controller manager and scheduler with fake nodes (KWOK), and the operator as a process with its
metrics on. Jobs of 2 + 1 pods of one GPU each are created at once, and one job whose claim does not exist, which is
refused again and again. After all run and a quiet period is over, the exit of a rank is written into the status of a
pod of some jobs, as a kubelet would.
Sources: the API server's audit log for requests and their times, the jobs' status for when they run, the operator's
/metrics for its memory and CPU. Fake pods answer no requests, so launchers are not asked for progress.
Prints one JSON line.

    python -m benchmarks.control_plane.scale --jobs 250 --failures 50
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import click
import yaml
from kubernetes import client, config
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.runs import versions
from benchmarks.control_plane.fake_nodes import NAMESPACE, FakeNodes, fake_nodes
from grpo_devcluster.progress import wait_until
from support.control_plane import audit
from support.control_plane.operators import Jobs, make_job, outcome

GROUPS = [{"name": "a", "replicas": 2, "gpus": 1}, {"name": "b", "gpus": 1}]
WRITES = ("create", "update", "patch", "delete")
CHILDREN = 5  # Service, NetworkPolicy, ConfigMap, 2 StatefulSets


class Observer:
    """Reads the API server's audit log and the operator's metrics."""

    def __init__(self, nodes: FakeNodes) -> None:
        api = config.new_client_from_config(str(nodes.plane.kubeconfig))
        self._custom, self._core = client.CustomObjectsApi(api), client.CoreV1Api(api)
        self._audit, self._user, self._operator = nodes.plane.audit_log, nodes.release.user, nodes.operator

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Status of each job except the refused one."""
        found = self._custom.list_namespaced_custom_object(
            "training.grpo.dev", "v1alpha1", NAMESPACE, "grpojobs", resource_version="0"
        )
        return {
            job["metadata"]["name"]: job.get("status", {}) for job in found["items"] if job["metadata"]["name"] != "bad"
        }

    def all_run(self, count: int) -> bool:
        """Whether all jobs run.

        A fake node that misses its lease on a busy machine never reports its pods as ready again; this function does.
        """
        if [status.get("phase") for status in self.statuses().values()] == ["Running"] * count:
            return True
        for pod in self._core.list_namespaced_pod(NAMESPACE, resource_version="0").items:
            holds = {c.type: c.status for c in pod.status.conditions or ()}
            if holds.get("ContainersReady") == "True" and holds.get("Ready") == "False":
                ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
                self._core.patch_namespaced_pod_status(pod.metadata.name, NAMESPACE, ready)
        return False

    def running_since(self, attempt: int = 0) -> dict[str, float]:
        """When each job began to run in an attempt, in Unix time; whole seconds, as in its status."""
        statuses = {
            name: status
            for name, status in self.statuses().items()
            if status.get("attempt") == attempt and "runningTime" in status
        }
        return {name: datetime.fromisoformat(status["runningTime"]).timestamp() for name, status in statuses.items()}

    def requests(self) -> list[dict[str, Any]]:
        """The operator's requests so far, from the audit log; without watches, which stay open."""
        return [
            e
            for e in audit.events(self._audit, self._user)
            if e["verb"] != "watch" and e["user"]["username"] == self._user
        ]

    def created(self) -> dict[str, float]:
        """When each job was created, in Unix time."""
        posts = [
            e
            for e in audit.events(self._audit, '"grpojobs"')
            if (e["verb"], e["responseStatus"]["code"]) == ("create", 201)
        ]
        return {e["objectRef"]["name"]: seconds(e) for e in posts if e["objectRef"]["name"] != "bad"}

    def use(self) -> dict[str, float]:
        """Memory (MiB) and CPU (seconds) used by the operator so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._operator.metrics_port}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        return {"rss": samples["process_resident_memory_bytes"] / 2**20, "cpu": samples["process_cpu_seconds_total"]}


def seconds(event: dict[str, Any]) -> float:
    """When the API server answered a request, in Unix time."""
    return datetime.fromisoformat(event["stageTimestamp"]).timestamp()


def applied(requests: list[dict[str, Any]], created: dict[str, float]) -> list[float]:
    """Seconds from each job's creation to its last child."""
    last: dict[str, float] = {}
    count: Counter[str] = Counter()
    for event in requests:
        about = event.get("objectRef", {})
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201 and "dryRun" not in event["requestURI"]:
            job = "-".join(about["name"].split("-")[:2])
            count[job] += 1
            last[job] = max(last.get(job, 0.0), seconds(event))
    assert all(count[job] >= CHILDREN for job in created), "some jobs lack children"
    return [last[job] - since for job, since in created.items()]


def spread(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum."""
    cuts = statistics.quantiles(values, n=20)
    return {"p50": round(cuts[9], 2), "p95": round(cuts[18], 2), "max": round(max(values), 2)}


def counted(requests: list[dict[str, Any]], since: float, until: float) -> dict[str, int]:
    """Number of requests in a period, by verb and resource."""
    within = [event for event in requests if since <= seconds(event) < until]
    return dict(
        Counter(f"{e['verb']} {e.get('objectRef', {}).get('resource', e['requestURI'])}" for e in within).most_common()
    )


@click.command()
@click.option("--jobs", "count", default=250, help="Jobs to create at once.")
@click.option("--failures", default=50, help="Jobs that fail at the same time.")
@click.option("--quiet-seconds", default=60, help="Length of the quiet period in which the operator's work is counted.")
@click.option("--bad/--no-bad", default=True, help="Add one job that is refused again and again.")
def main(count: int, failures: int, quiet_seconds: int, bad: bool) -> None:
    """Measure and print."""
    with fake_nodes(count * 3 // 8 + 8) as nodes:
        result = measure(nodes.jobs, Observer(nodes), count, failures, quiet_seconds, bad=bad)
    result |= {
        "versions": versions("kopf", "kubernetes"),
        "cpus": os.cpu_count(),
        "load average": round(os.getloadavg()[1], 1),
        "command": " ".join(["python -m benchmarks.control_plane.scale", *sys.argv[1:]]),
    }
    print(json.dumps(result))


def measure(
    jobs: Jobs, observer: Observer, count: int, failures: int, quiet_seconds: int, *, bad: bool
) -> dict[str, Any]:
    """Create jobs, wait, fail some, wait again."""
    if bad:
        jobs.apply(make_job("bad", claim="nothing", trainer={"groups": GROUPS}))
        jobs.wait_for("bad", "Accepted", "False")
    use = {"idle": observer.use()}
    names = [f"job-{number:03d}" for number in range(count)]
    manifests = [make_job(name, trainer={"groups": GROUPS}, failurePolicy={"backoffSeconds": 0}) for name in names]
    begin = time.time()
    jobs("create", "-f", "-", stdin=yaml.safe_dump_all(manifests))
    created_in = time.time() - begin
    wait_until(lambda: observer.all_run(count), "all run", 600, interval=5)
    all_run = max(observer.running_since().values()) - begin
    created = observer.created()
    first = observer.requests()
    use["all run"] = observer.use()
    time.sleep(5)
    quiet = time.time()
    before = observer.use()["cpu"]
    time.sleep(quiet_seconds)
    use["quiet"] = observer.use()
    steady = counted(observer.requests(), quiet, quiet + quiet_seconds)
    failed: dict[str, float] = {}

    def fail(name: str) -> None:
        jobs.finish_pod(f"{name}-b-0", 70, outcome(70, "RankFailed", "killed"))
        failed[name] = time.time()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fail, names[:failures]))
    # Asked seldom, because asking takes processor time from the operator.
    wait_until(
        lambda: observer.all_run(count) and observer.running_since(1).keys() == failed.keys(),
        "all run again",
        600,
        interval=5,
    )
    again = observer.running_since(1)
    use["restarted"] = observer.use()
    restarts = [again[name] - failed[name] for name in failed]
    to_children = applied(first, created)
    return {
        "jobs": count,
        "pods": count * 3,
        "bad": bad,
        "seconds": {
            "kubectl create": round(created_in, 1),
            "all run": round(all_run, 1),
            "children": spread(to_children),
            "restart": spread(restarts),
        },
        "requests": {
            "until all run": counted(first, begin, begin + all_run),
            "quiet": steady,
            "quiet seconds": quiet_seconds,
        },
        "quiet writes": sum(
            number for what, number in steady.items() if what.split()[0] in WRITES and "dry" not in what
        ),
        "quiet cpu seconds": round(use["quiet"]["cpu"] - before, 2),
        "use": {when: {name: round(value, 1) for name, value in values.items()} for when, values in use.items()},
        "raw": {
            "children": [round(value, 2) for value in to_children],
            "restart": [round(value, 2) for value in restarts],
        },
    }


if __name__ == "__main__":
    main()
