"""A real API server, controller manager and scheduler with fake nodes (KWOK), and the operator as a process of its own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "api"), str(ROOT / "devcluster")]

from operator_fixture import Jobs, Operator, Release, install_chart  # noqa: E402

from grpo_cli.local import free_ports  # noqa: E402
from grpo_devcluster import binaries, kube  # noqa: E402
from grpo_devcluster.controlplane import ControlPlane  # noqa: E402

NAMESPACE = "bench"


@dataclass(frozen=True, kw_only=True)
class FakeNodes:
    """What runs."""

    plane: ControlPlane
    release: Release
    operator: Operator
    jobs: Jobs  # of `NAMESPACE`


@contextmanager
def fake_nodes(count: int) -> Iterator[FakeNodes]:
    """All of it on so many nodes, installed by the chart, until the block ends."""
    binaries.build("controlplane")
    with tempfile.TemporaryDirectory() as scratch, ControlPlane(Path(scratch) / "plane", kwok_nodes=count) as plane:

        def kubectl(*args: str, stdin: str | None = None) -> str:
            return kube.kubectl(plane.kubeconfig, *args, stdin=stdin)

        release = install_chart(plane, kubectl)
        operator = Operator(release.kubeconfig, Path(scratch) / "operator.log", release.arguments, metrics_port=free_ports(1)[0])
        operator.start()
        try:
            kubectl("create", "namespace", NAMESPACE)
            yield FakeNodes(plane=plane, release=release, operator=operator, jobs=Jobs(kubectl, NAMESPACE))
        finally:
            operator.kill()
