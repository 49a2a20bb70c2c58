"""Clients of the cluster's API for the devcluster itself."""

import datetime
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from grpo_devcluster import binaries

Manifest = Mapping[str, Any]


def core(kubeconfig: Path) -> client.CoreV1Api:
    """Return the client for nodes, claims and volumes."""
    return client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))


def kubectl(kubeconfig: Path, *args: str, stdin: str | None = None) -> str:
    """Run the kubectl that was built with the cluster and return its output. Raises RuntimeError with its message."""
    command = [str(binaries.binary("kubectl")), f"--kubeconfig={kubeconfig}", *args]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def helm(kubeconfig: Path, *args: str) -> str:
    """Run the helm that was built with the cluster and return its output. Raises RuntimeError with its message."""
    command = [str(binaries.binary("helm")), f"--kubeconfig={kubeconfig}", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"helm {' '.join(args)}: {done.stderr.strip()} {done.stdout.strip()}".strip())
    return done.stdout


def apply(kubeconfig: Path, manifests: Sequence[Manifest]) -> None:
    """Apply all manifests by one server-side apply."""
    text = yaml.safe_dump_all([dict(m) for m in manifests])
    kubectl(
        kubeconfig, "apply", "--server-side", "--force-conflicts", "--field-manager=devcluster", "-f", "-", stdin=text
    )


def is_ready(node: Any, since: datetime.datetime | None = None) -> bool:
    """Return whether a node of the client's list reports Ready; reports from before `since` do not count."""
    conditions = [c for c in node.status.conditions or [] if c.type == "Ready" and c.status == "True"]
    return any(since is None or c.last_heartbeat_time >= since for c in conditions)
