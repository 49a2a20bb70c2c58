"""Many jobs at once: how soon each gets its children and its restart, and what the operator costs meanwhile and while nothing happens.

A real API server, controller manager and scheduler with fake nodes (KWOK), and the operator as a process of its own with its metrics on.
Jobs of 2 + 1 pods of one GPU each, created in one go; one more, whose claim does not exist, is refused again and again beside them. When
all run and a while is over, the exit of a rank is put into the status of a pod of some of them, as a kubelet would. Requests and when they
were answered are the API server's audit log's, since when jobs run is their status', memory and CPU are told by the operator's own
/metrics. Fake pods answer nobody, so launchers are not asked for progress. Prints one JSON line.

    python benchmarks/scale.py --jobs 250 --failures 50
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

from fake_nodes import NAMESPACE, FakeNodes, fake_nodes  # isort: skip  # it makes the next ones importable
import audit
from operator_fixture import Jobs, make_job, outcome
from runs import versions

from grpo_devcluster.progress import wait_until

GROUPS = [{"name": "a", "replicas": 2, "gpus": 1}, {"name": "b", "gpus": 1}]
WRITES = ("create", "update", "patch", "delete")
CHILDREN = 5  # Service, NetworkPolicy, ConfigMap, 2 StatefulSets


class Observer:
    """What the API server and the operator say."""

    def __init__(self, nodes: FakeNodes) -> None:
        api = config.new_client_from_config(str(nodes.plane.kubeconfig))
        self._custom, self._core = client.CustomObjectsApi(api), client.CoreV1Api(api)
        self._audit, self._user, self._operator = nodes.plane.audit_log, nodes.release.user, nodes.operator

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Status by job, but for the bad one."""
        found = self._custom.list_namespaced_custom_object("training.grpo.dev", "v1alpha1", NAMESPACE, "grpojobs", resource_version="0")
        return {job["metadata"]["name"]: job.get("status", {}) for job in found["items"] if job["metadata"]["name"] != "bad"}

    def all_run(self, count: int) -> bool:
        """Whether all jobs do. A fake node that misses its lease on a busy machine never says again that its pods are ready: this does."""
        if [status.get("phase") for status in self.statuses().values()] == ["Running"] * count:
            return True
        for pod in self._core.list_namespaced_pod(NAMESPACE, resource_version="0").items:
            holds = {c.type: c.status for c in pod.status.conditions or ()}
            if holds.get("ContainersReady") == "True" and holds.get("Ready") == "False":
                ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
                self._core.patch_namespaced_pod_status(pod.metadata.name, NAMESPACE, ready)
        return False

    def running_since(self, epoch: int = 0) -> dict[str, float]:
        """Since when jobs run in an attempt, in Unix time; whole seconds, as their status has it."""
        told = {name: status for name, status in self.statuses().items() if status.get("epoch") == epoch and "runningTime" in status}
        return {name: datetime.fromisoformat(status["runningTime"]).timestamp() for name, status in told.items()}

    def requests(self) -> list[dict[str, Any]]:
        """The operator's requests so far, as in the audit log; no watches, which last."""
        return [e for e in audit.events(self._audit, self._user) if e["verb"] != "watch" and e["user"]["username"] == self._user]

    def created(self) -> dict[str, float]:
        """When each job was created, in Unix time."""
        posts = [e for e in audit.events(self._audit, '"grpojobs"') if (e["verb"], e["responseStatus"]["code"]) == ("create", 201)]
        return {e["objectRef"]["name"]: seconds(e) for e in posts if e["objectRef"]["name"] != "bad"}

    def use(self) -> dict[str, float]:
        """The operator's memory (MiB) and CPU (seconds) so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._operator.metrics_port}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        return {"rss": samples["process_resident_memory_bytes"] / 2**20, "cpu": samples["process_cpu_seconds_total"]}


def seconds(event: dict[str, Any]) -> float:
    """When the API server has answered a request, in Unix time."""
    return datetime.fromisoformat(event["stageTimestamp"]).timestamp()


def applied(requests: list[dict[str, Any]], created: dict[str, float]) -> list[float]:
    """Seconds from each job's creation to the last of its children."""
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
    """Median, p95 and greatest."""
    cuts = statistics.quantiles(values, n=20)
    return {"p50": round(cuts[9], 2), "p95": round(cuts[18], 2), "max": round(max(values), 2)}


def counted(requests: list[dict[str, Any]], since: float, until: float) -> dict[str, int]:
    """Requests in a span of time by verb and resource."""
    within = [event for event in requests if since <= seconds(event) < until]
    return dict(Counter(f"{e['verb']} {e.get('objectRef', {}).get('resource', e['requestURI'])}" for e in within).most_common())


@click.command()
@click.option("--jobs", "count", default=250, help="Jobs to create at once.")
@click.option("--failures", default=50, help="Jobs that fail at the same time.")
@click.option("--quiet-seconds", default=60, help="How long nothing happens, to count what the operator does meanwhile.")
@click.option("--bad/--no-bad", default=True, help="With one job more, that is refused again and again.")
def main(count: int, failures: int, quiet_seconds: int, bad: bool) -> None:
    """Measure and print."""
    with fake_nodes(count * 3 // 8 + 8) as nodes:
        result = measure(nodes.jobs, Observer(nodes), count, failures, quiet_seconds, bad=bad)
    result |= {
        "versions": versions("kopf", "kubernetes"),
        "cpus": os.cpu_count(),
        "load average": round(os.getloadavg()[1], 1),
        "command": " ".join(["python", "benchmarks/scale.py", *sys.argv[1:]]),
    }
    print(json.dumps(result))  # noqa: T201


def measure(jobs: Jobs, observer: Observer, count: int, failures: int, quiet_seconds: int, *, bad: bool) -> dict[str, Any]:
    """Create, wait, fail some, wait."""
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
    # Asked seldom: who looks takes the processor from whom is looked at.
    wait_until(lambda: observer.all_run(count) and observer.running_since(1).keys() == failed.keys(), "all run again", 600, interval=5)
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
        "requests": {"until all run": counted(first, begin, begin + all_run), "quiet": steady, "quiet seconds": quiet_seconds},
        "quiet writes": sum(number for what, number in steady.items() if what.split()[0] in WRITES and "dry" not in what),
        "quiet cpu seconds": round(use["quiet"]["cpu"] - before, 2),
        "use": {when: {name: round(value, 1) for name, value in told.items()} for when, told in use.items()},
        "raw": {"children": [round(value, 2) for value in to_children], "restart": [round(value, 2) for value in restarts]},
    }


if __name__ == "__main__":
    main()
