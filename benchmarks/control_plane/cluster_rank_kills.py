"""Seconds from SIGKILL of a rank to its next optimizer step on the devcluster, with both restart strategies.

    python -m benchmarks.control_plane.cluster_rank_kills --kills 5 --output cluster_rank_kills.jsonl
    python -m benchmarks.control_plane.cluster_rank_kills --kills 1 --strategy InPlace --backoff 10 --output ahead.jsonl

The job of `training/rank_kills.py` with a tiny model: one trainer pod, one engine pod, real kubelets. The operator and
the workload are those of this checkout. `seen` is when the job's status says that the attempt has failed; the other
parts are those of rank_kills.py, and `restart` is the share of the back-off, the operator, Kubernetes and the launcher.
Appends a line for each kill, and one for each job's start.
"""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import ROOT
from benchmarks.common.runs import about, append, commit
from benchmarks.training.kills import command
from benchmarks.training.rank_kills import RANK, as_table, recovery
from grpo_demo.cluster import install_operator
from grpo_demo.kubectl import Kubectl as DemoKubectl
from grpo_devcluster import images, storage
from grpo_devcluster.cluster import Cluster
from grpo_devcluster.progress import wait_until
from support.cluster import reads
from support.cluster.jobs_on_cluster import JobOnCluster

MODULE = "benchmarks.control_plane.cluster_rank_kills"
STRATEGIES = ("InPlace", "Recreate")
POD = "tiny-t-0"
REWARD = "def vary(completion_ids, **_):\n    return [sum(ids) % 97 / 97 for ids in completion_ids]\n"


@click.command(help=__doc__)
@click.option("--kills", default=5, show_default=True, help="Of each strategy.")
@click.option("--strategy", "strategies", type=click.Choice(STRATEGIES), multiple=True, default=STRATEGIES)
@click.option("--backoff", default=0, show_default=True, help="Seconds of failurePolicy.backoffSeconds.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(kills: int, strategies: tuple[str, ...], backoff: int, output: Path) -> None:
    cluster = Cluster()
    was_running = cluster.running()
    cluster.up("a=2,b=1")
    try:
        archive = images.build_operator()
        cluster.load(archive)
        install_operator(DemoKubectl(cluster.kubeconfig), archive)
        for strategy in strategies:
            lines = []
            with _job(cluster) as job:
                for line in measure(job, strategy, kills, backoff):
                    described = {"strategy": strategy, "commit": commit(), "cpus": os.cpu_count()}
                    append(output, described | line | about(MODULE, kills=kills, backoff=backoff))
                    lines.append(line)
                    click.echo(json.dumps(line))
            click.echo(f"{strategy}\n{as_table(lines)}")
    finally:
        if not was_running:
            cluster.down()


@contextmanager
def _job(cluster: Cluster) -> Iterator[JobOnCluster]:
    storage.recycle(cluster.kubeconfig)
    kubectl, name = reads.Kubectl(cluster.kubeconfig), f"bench-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    try:
        yield JobOnCluster(kubectl, cluster.kubeconfig, name)
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
        kubectl("delete", "pod", "--all", "-n", name, "--grace-period=1", "--wait=false")
        kubectl("wait", "pod", "--all", "-n", name, "--for=delete", "--timeout=240s")


def measure(job: JobOnCluster, strategy: str, kills: int, backoff: int) -> Iterator[dict[str, Any]]:
    """Run a job, kill its rank, and yield a line for its start and for each recovery."""
    draw = random.Random(1)
    data = job.apply(files={"bench_reward.py": REWARD}, **spec(strategy, backoff))
    yield {"kill": 0, "seconds": _after(job, None, 0.0)}
    for kill in range(1, kills + 1):
        folder = data / job.namespace / "tiny" / job.get()["metadata"]["uid"] / "checkpoints"
        done = len(job.metrics(data))
        wait_until(partial(_has_checkpoint, folder), "a checkpoint", 600)
        wait_until(partial(_has_steps, job, data, done + 1), "a further step", 600)
        time.sleep(draw.random() * float(job.metrics(data)[-1]["step_time"]))
        attempt, uid = job.get()["status"]["attempt"], job.get_pod(POD)["metadata"]["uid"]
        rank = rank_of(uid)
        killed = time.time()
        rank.kill()
        wait_until(partial(_has_failed, job, attempt), "the failure in the status", 300, interval=0.05)
        seen = time.time()
        yield {"kill": kill, "seconds": _after(job, killed, seen)}


def _has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("step-*/manifest.json"))


def _has_steps(job: JobOnCluster, data: Path, count: int) -> bool:
    return len(job.metrics(data)) >= count


def _has_failed(job: JobOnCluster, attempt: int) -> bool:
    failure = job.get()["status"].get("lastFailure") or {}
    return bool(failure.get("attempt", -1) == attempt)


def _after(job: JobOnCluster, killed: float | None, seen: float) -> dict[str, float]:
    found: list[dict[str, float]] = []

    def is_over() -> bool:
        with suppress(RuntimeError):  # the pod has no container yet
            if parts := recovery(job("logs", POD), killed, seen):
                found.append(parts)
        return bool(found)

    wait_until(is_over, "the next step", 900, interval=0.5)
    return found[0]


def rank_of(uid: str) -> psutil.Process:
    """Return the process of the rank of the pod with this UID: pods are processes of this machine."""
    mark = f"POD_UID={uid}"
    for process in psutil.process_iter():
        words = command(process)
        if RANK in words and "python" in words:
            with suppress(psutil.Error):
                if mark in {f"{name}={value}" for name, value in process.environ().items()}:
                    return process
    raise LookupError(f"no rank runs in the pod with UID {uid}")


def spec(strategy: str, backoff: int) -> dict[str, Any]:
    """Return the fields of the job that are not those of `JobOnCluster`."""
    return {
        "device": {"type": "cpu"},
        "rewards": [{"name": "vary", "function": "bench_reward:vary"}],
        "training": {"promptsPerStep": 4, "numGenerations": 4, "maxSteps": 10**5, "maxCompletionLength": 32},
        "generation": {
            "topology": "Server",
            "maxModelLen": 256,
            "kvCacheMemory": "16Mi",
            "engineArgs": {"enforce_eager": True},
            "server": {"groups": [{"name": "e", "gpus": 1}]},
        },
        "trainer": {"groups": [{"name": "t", "gpus": 1}]},
        "storage": {"claimName": "runs", "checkpointEverySteps": 4, "keep": 1},
        "podTemplate": {"env": [{"name": "PYTHONPATH", "value": f"/data:{ROOT}/spec:{ROOT}/workload"}]},
        "failurePolicy": {"restartStrategy": strategy, "backoffSeconds": backoff, "maxRestarts": 10_000},
    }


if __name__ == "__main__":
    main()
