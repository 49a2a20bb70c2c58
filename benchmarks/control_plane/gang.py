"""Jobs that compete for nodes: how long until all are done, and how many GPUs stand idle or are held in vain meanwhile.

A real API server, controller manager and scheduler, and the operator as a process; nodes are fake, and a job "trains"
for some seconds once all its pods are ready. All jobs are submitted at once. Three ways: pods find nodes one by one,
`scheduling.gang: Native`, and a queue of Kueue with a quota for all GPUs. Durations and scheduling.timeoutSeconds are
short by about the same factor (10 s and 5 s stand for 20 and 10 minutes). Prints one JSON line for each run.

    python -m benchmarks.control_plane.gang --output benchmarks/results/gang.jsonl
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.common.runs import versions
from grpo_devcluster import binaries, kube
from grpo_devcluster.controlplane import ControlPlane
from support.control_plane import kueue
from support.control_plane.operators import Jobs, Operator, install_chart, make_job, outcome

GPUS = 8
WAYS = ("one by one", "Native", "Kueue")
TIMEOUT_SECONDS = 5
POLL_SECONDS = 0.25
GATES = {"GenericWorkload": True}
API = {"scheduling.k8s.io/v1beta1": True}

QUEUE = f"""
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {{name: all}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {{name: all}}
spec:
  namespaceSelector: {{}}
  resourceGroups:
  - coveredResources: [nvidia.com/gpu]
    flavors: [{{name: all, resources: [{{name: nvidia.com/gpu, nominalQuota: {8 * GPUS}}}]}}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {{name: all, namespace: gang}}
spec: {{clusterQueue: all}}
"""


@dataclass(frozen=True)
class Work:
    """A job: number of nodes, and seconds that it trains."""

    name: str
    nodes: int
    seconds: float


@dataclass
class Sums:
    """GPU seconds by what the GPUs did."""

    trained: float = 0.0  # of a job that runs
    held: float = 0.0  # of a job of which not all pods run
    started: dict[str, float] = field(default_factory=dict)  # when each job ran, in seconds after the first submission


def draw(seed: int, jobs: int) -> list[Work]:
    """Return jobs of 1 to 6 of the 8 nodes that train for 10 to 30 s."""
    dice = random.Random(seed)
    return [Work(f"job-{n:02d}", dice.randint(1, 6), round(dice.uniform(10, 30), 1)) for n in range(jobs)]


@contextlib.contextmanager
def cluster(folder: Path, way: str, nodes: int) -> Iterator[tuple[Path, Jobs]]:
    """Run a control plane, fake nodes, the operator and, for its way, Kueue."""
    binaries.build("all")
    with ControlPlane(folder, kwok_nodes=nodes, kwok_gpus=GPUS, feature_gates=GATES, runtime_config=API) as plane:

        def kubectl(*args: str, stdin: str | None = None) -> str:
            return kube.kubectl(plane.kubeconfig, *args, stdin=stdin)

        kubectl("create", "namespace", "gang")
        release = install_chart(plane, kubectl)
        queue: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if way == "Kueue":
            kueue.install_crds(kubectl)
            queue = kueue.running(plane, kubectl)
        operator = Operator(release.kubeconfig, plane.state / "logs" / "operator.log", release.arguments)
        with queue:
            if way == "Kueue":
                kubectl("apply", "-f", "-", stdin=QUEUE)
            operator.start()
            try:
                yield plane.kubeconfig, Jobs(kubectl, "gang")
            finally:
                operator.kill()


def manifest(work: Work, way: str) -> dict[str, Any]:
    """Return the GRPOJob."""
    scheduling: dict[str, Any] = {"timeoutSeconds": TIMEOUT_SECONDS}
    made = make_job(
        work.name,
        trainer={"groups": [{"name": "a", "replicas": work.nodes, "gpus": GPUS}]},
        training={"promptsPerStep": work.nodes * GPUS},
        failurePolicy={"backoffSeconds": 1},
        scheduling=scheduling | ({"gang": "Native"} if way == "Native" else {}),
    )
    if way == "Kueue":
        made["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "all"}
    return made


def compete(kubeconfig: Path, jobs: Jobs, works: list[Work], way: str, deadline: float) -> tuple[float, Sums]:
    """Submit all jobs, finish each after its time, and return the seconds until all are done, with the sums."""
    core, sums = kube.core(kubeconfig), Sums()
    finished: set[str] = set()
    sizes = {work.name: work for work in works}
    jobs("create", "-f", "-", stdin=yaml.safe_dump_all([manifest(work, way) for work in works]))
    began = last = time.monotonic()
    while len(finished) < len(works):
        time.sleep(POLL_SECONDS)
        phases = {one["metadata"]["name"]: one.get("status", {}).get("phase") for one in jobs.list("grpo")}
        pods = core.list_namespaced_pod("gang", resource_version="0").items
        now = time.monotonic()
        if now - began > deadline:
            raise TimeoutError(f"{len(finished)} of {len(works)} jobs are done after {deadline:.0f} s: {phases}")
        for pod in pods:
            owner = pod.metadata.labels["training.grpo.dev/job"]
            if pod.spec.node_name and owner not in finished:
                trains = phases.get(owner) == "Running"
                sums.trained += (now - last) * GPUS * trains
                sums.held += (now - last) * GPUS * (not trains)
        last = now
        for name, phase in phases.items():
            if phase == "Running":
                sums.started.setdefault(name, now - began)
            if (
                name in sums.started
                and name not in finished
                and now - began - sums.started[name] >= sizes[name].seconds
            ):
                for number in range(sizes[name].nodes):
                    jobs.finish_pod(f"{name}-a-{number}", 0, outcome(0))
                finished.add(name)
    return time.monotonic() - began, sums


@click.command()
@click.option("--jobs", "count", default=20, help="Jobs that compete.")
@click.option("--nodes", default=8, help="Nodes of 8 GPUs.")
@click.option("--seeds", default=3, help="Sets of jobs.")
@click.option("--way", "ways", type=click.Choice(WAYS), multiple=True, default=WAYS, help="How pods find nodes.")
@click.option("--deadline", default=1800.0, help="Most seconds of a run.")
@click.option("--output", type=click.Path(path_type=Path), help="File for the lines; standard output if not given.")
def main(count: int, nodes: int, seeds: int, ways: tuple[str, ...], deadline: float, output: Path | None) -> None:
    """Measure and print."""
    for seed in range(seeds):
        works = draw(seed, count)
        least = sum(work.nodes * work.seconds for work in works) / nodes
        for way in ways:
            folder = tempfile.mkdtemp(prefix="gang-")
            with cluster(Path(folder), way, nodes) as (kubeconfig, jobs):
                seconds, sums = compete(kubeconfig, jobs, works, way, deadline)
                restarts = sum(one["status"]["restarts"]["total"] for one in jobs.list("grpo"))
            line = {
                "way": way,
                "seed": seed,
                "makespan": round(seconds, 1),
                "least": round(least, 1),  # all GPUs busy from the first moment to the last
                "gpu_seconds_held": round(sums.held),
                "gpu_seconds_idle": round(nodes * GPUS * seconds - sums.trained),
                "gpu_seconds_trained": round(sums.trained),
                "restarts": restarts,
                "started": {name: round(at, 1) for name, at in sorted(sums.started.items())},
                "jobs": [asdict(work) for work in works],
                "timeout_seconds": TIMEOUT_SECONDS,
                "versions": versions("kopf") | {"Kubernetes": binaries.KUBERNETES, "Kueue": kueue.KUEUE.version},
                "command": " ".join(["python -m benchmarks.control_plane.gang", *sys.argv[1:]]),
            }
            text = json.dumps(line) + "\n"
            if output is None:
                sys.stdout.write(text)
            else:
                with output.open("a") as file:
                    file.write(text)


if __name__ == "__main__":
    main()
