"""Seconds from a failed rank until all pods of the next attempt exist, and the operator's share of them.

A real API server, controller manager and scheduler with fake nodes (KWOK), and the operator as a process. In each
round, the exit of a rank is written into a pod's status as a kubelet would. Watches then record:

    failed -> intent (Restarting is True) -> last old pod is gone -> contract of the next attempt -> all new pods exist

The operator's share is failed -> intent, plus last pod gone -> all StatefulSets scaled up. The rest is Kubernetes'.
Prints one JSON line.

    python -m benchmarks.control_plane.recovery --kills 30 --replicas 4
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
from kubernetes import client, config, watch
from urllib3.exceptions import ProtocolError

from benchmarks.common.runs import versions
from benchmarks.control_plane.fake_nodes import NAMESPACE, fake_nodes
from grpo_devcluster.progress import wait_until
from support.control_plane.operators import make_job, outcome

SELECTOR = "training.grpo.dev/job=bench"


class Tape:
    """Events that watches report, with their time: (seconds, kind, event, object)."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._events: list[tuple[float, str, str, dict[str, Any]]] = []
        api = config.new_client_from_config(str(kubeconfig))
        custom, core, apps = client.CustomObjectsApi(api), client.CoreV1Api(api), client.AppsV1Api(api)
        streams: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
            "job": (custom.list_namespaced_custom_object, ("training.grpo.dev", "v1alpha1", namespace, "grpojobs"), {}),
            "pod": (core.list_namespaced_pod, (namespace,), {"label_selector": SELECTOR}),
            "set": (apps.list_namespaced_stateful_set, (namespace,), {"label_selector": SELECTOR}),
        }
        for kind, (function, args, options) in streams.items():
            threading.Thread(target=self._follow, args=(kind, function, args, options), daemon=True).start()

    def _follow(self, kind: str, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        with contextlib.suppress(ProtocolError):  # the API server ends with the benchmark
            for event in watch.Watch().stream(function, *args, **options):
                self._events.append((time.monotonic(), kind, event["type"], event["raw_object"]))

    def since(self, start: float, kind: str) -> list[tuple[float, str, dict[str, Any]]]:
        """Events of a kind since a time."""
        return [(at, event, raw) for at, what, event, raw in list(self._events) if what == kind and at >= start]


def _attempt(raw: dict[str, Any]) -> int:
    return int(raw["metadata"]["labels"].get("training.grpo.dev/attempt", -1))


def round_of(tape: Tape, start: float, attempt: int, replicas: int) -> dict[str, float] | None:
    """Times of one recovery, in seconds after the failure; None until it is over."""
    restarting = [
        at for at, _, raw in tape.since(start, "job")
        if any(c["type"] == "Restarting" and c["status"] == "True" for c in raw.get("status", {}).get("conditions", ()))
    ]  # fmt: skip
    gone = [at for at, event, raw in tape.since(start, "pod") if event == "DELETED" and _attempt(raw) == attempt - 1]
    scaled = {
        raw["metadata"]["name"]: at
        for at, _, raw in reversed(tape.since(start, "set"))
        if _attempt(raw) == attempt and raw["spec"]["replicas"]
    }
    made = {
        raw["metadata"]["name"]: at for at, _, raw in reversed(tape.since(start, "pod")) if _attempt(raw) == attempt
    }
    if not restarting or len(gone) < replicas + 1 or len(scaled) < 2 or len(made) < replicas + 1:
        return None
    return {
        "intent": restarting[0] - start,
        "gone": max(gone) - start,
        "scaled": max(scaled.values()) - start,
        "made": max(made.values()) - start,
        "own": (restarting[0] - start) + max(0.0, max(scaled.values()) - max(gone)),
    }


@click.command()
@click.option("--kills", default=30, help="Recoveries to measure.")
@click.option("--replicas", default=4, help="Pods of the first group; the second has one.")
def main(kills: int, replicas: int) -> None:
    """Measure and print."""
    with fake_nodes(8) as nodes:
        jobs = nodes.jobs
        groups = [{"name": "a", "replicas": replicas, "gpus": 2}, {"name": "b", "gpus": 1}]
        policy = {"backoffSeconds": 0, "maxRestarts": kills}
        jobs.apply(make_job("bench", trainer={"groups": groups}, training={"promptsPerStep": 64}, failurePolicy=policy))
        jobs.wait_for("bench", "Running", "True")
        tape = Tape(nodes.plane.kubeconfig, NAMESPACE)
        rounds = []
        for number in range(1, kills + 1):
            wait_until(lambda: jobs.get("grpo", "bench")["status"]["phase"] == "Running", "running", 60)
            start = time.monotonic()
            jobs.finish_pod("bench-b-0", 70, outcome(70, "RankFailed", "killed"))

            def is_over(start: float = start, number: int = number) -> bool:
                return round_of(tape, start, number, replicas) is not None

            wait_until(is_over, f"round {number}", 60)
            rounds.append(round_of(tape, start, number, replicas))
    moments = {name: [one[name] for one in rounds if one] for name in ("intent", "gone", "scaled", "made", "own")}
    summary = {
        name: {"p50": round(statistics.median(values), 3), "p95": round(statistics.quantiles(values, n=20)[-1], 3)}
        for name, values in moments.items()
    }
    result = {
        "kills": kills,
        "pods": replicas + 1,
        "seconds": summary,
        "raw": {name: [round(value, 4) for value in values] for name, values in moments.items()},
        "versions": versions("kopf", "kubernetes"),
        "command": " ".join(["python -m benchmarks.control_plane.recovery", *sys.argv[1:]]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
