"""A real API server, controller manager and scheduler with fake nodes (KWOK), and the operator as a process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.local.processes import free_ports
from grpo_devcluster import binaries, kube
from grpo_devcluster.controlplane import ControlPlane
from support.control_plane.operators import Jobs, Operator, Release, install_chart

NAMESPACE = "bench"


@dataclass(frozen=True, kw_only=True)
class FakeNodes:
    """The running control plane, operator and jobs."""

    plane: ControlPlane
    release: Release
    operator: Operator
    metrics_port: int  # of the operator
    jobs: Jobs  # in `NAMESPACE`


@contextmanager
def fake_nodes(count: int, gpus: int = 8) -> Iterator[FakeNodes]:
    """Start it all with `count` nodes, installed by the chart; end it with the block."""
    binaries.build("controlplane")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ControlPlane(Path(scratch) / "plane", kwok_nodes=count, kwok_gpus=gpus) as plane,
    ):
        (port,) = free_ports(1)

        def kubectl(*args: str, stdin: str | None = None) -> str:
            return kube.kubectl(plane.kubeconfig, *args, stdin=stdin)

        release = install_chart(plane, kubectl)
        log = plane.state / "logs" / "operator.log"
        operator = Operator(release.kubeconfig, log, release.arguments, metrics_port=port)
        operator.start()
        try:
            kubectl("create", "namespace", NAMESPACE)
            jobs = Jobs(kubectl, NAMESPACE)
            yield FakeNodes(plane=plane, release=release, operator=operator, metrics_port=port, jobs=jobs)
        finally:
            operator.kill()
