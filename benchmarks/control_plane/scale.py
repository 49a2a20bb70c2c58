"""GRPOJobs at scale, side by side with bare StatefulSets, JobSet and LeaderWorkerSet.

One real API server, controller manager and scheduler with fake nodes (KWOK), on which everything takes turns. In each
repetition every scenario runs once for each of its sides; a turn has a namespace of its own, in which one job is ready
before anything is measured, and only the controller of its side runs. Appends one JSON object for each turn.

    python -m benchmarks.control_plane.scale
    python -m benchmarks.control_plane.scale --scenario large --jobs 5000 --repetitions 1

`page.py` draws docs/performance.md from the result.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks import ROOT
from benchmarks.common.runs import append, commit, versions
from benchmarks.control_plane import peers, scenarios
from benchmarks.control_plane.client import Api
from benchmarks.control_plane.costs import costs
from benchmarks.control_plane.fake_nodes import fake_nodes
from benchmarks.control_plane.large import large, quiet
from benchmarks.control_plane.sides import sides
from benchmarks.control_plane.turn import Raw, Turn, turn
from grpo_devcluster import binaries
from grpo_devcluster.progress import step

RESULTS = ROOT / "benchmarks/results/scale.jsonl"
PODS_OF_A_NODE = 250


@dataclass(frozen=True)
class Scenario:
    """A measurement: its scenario, its number of jobs or pods, and its sides."""

    measure: Callable[[Turn, int], Raw]
    count: int
    sides: tuple[str, ...] = ("grpojob",)
    pods: int = 4  # of each counted thing


ALL = ("bare", "grpojob", "jobset", "lws")
SCENARIOS = {
    "jobs": Scenario(scenarios.start, 250, ALL),
    "pods": Scenario(scenarios.one_job, 1000, ALL, pods=1),
    "burst": Scenario(scenarios.burst, 100),
    "costs": Scenario(costs, 100),
    "restart": Scenario(scenarios.restart, 50, ("bare", "grpojob")),
    "large": Scenario(large, 1000),
    "quiet": Scenario(quiet, 300),
}


@click.command()
@click.option("--scenario", "names", multiple=True, type=click.Choice(list(SCENARIOS)), help="Default: all.")
@click.option("--side", "only", multiple=True, type=click.Choice(ALL), help="Default: all sides of a scenario.")
@click.option("--jobs", type=int, help="Jobs (of `pods`: pods) in place of each scenario's own number.")
@click.option("--repetitions", default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(names: tuple[str, ...], only: tuple[str, ...], jobs: int | None, repetitions: int, output: Path) -> None:
    """Measure, and append a line for each turn."""
    chosen = {name: SCENARIOS[name] for name in names or SCENARIOS}
    most = max((jobs or one.count) * one.pods for one in chosen.values())
    about = _about()
    with fake_nodes(math.ceil(most / PODS_OF_A_NODE) + 4, gpus=PODS_OF_A_NODE) as nodes:
        nodes.operator.kill()
        api, found = Api(nodes.plane.kubeconfig), sides(nodes)
        number = 0
        for repetition in range(repetitions):
            for name, scenario in chosen.items():
                for side in (found[one] for one in scenario.sides if one in (only or ALL)):
                    number += 1
                    said = f"{name} {jobs or scenario.count}, {side.name}, {repetition + 1} of {repetitions}"
                    with step(said), turn(nodes, api, side, f"turn-{number}") as current:
                        began = time.time()
                        measured = scenario.measure(current, jobs or scenario.count)
                        line = {"scenario": name, "side": side.name, "repetition": repetition, "time": round(began)}
                        append(output, line | measured | about)  # removing thousands of jobs takes minutes


def _about() -> Raw:
    """The part of a line about the machine, the programs and the command."""
    programs = {"kubernetes control plane": binaries.KUBERNETES.removeprefix("v"), "python": platform.python_version()}
    others = {peer.name: peer.version.removeprefix("v") for peer in (peers.JOBSET, peers.LWS)}
    return {
        "commit": commit(),
        "versions": programs | others | versions("kopf", "kubernetes"),
        "cpus": os.cpu_count(),
        "load average": round(os.getloadavg()[1], 1),
        "command": " ".join(["python -m benchmarks.control_plane.scale", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    main()
