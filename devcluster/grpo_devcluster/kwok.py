"""Fake nodes: pods on them become ready at once and run nothing."""

from pathlib import Path

from grpo_devcluster import binaries
from grpo_devcluster.process import Daemon

ANNOTATION = "kwok.x-k8s.io/node"


def node_name(index: int) -> str:
    """Return the name of a fake node."""
    return f"kwok-{index:03d}"


def node(index: int, gpus: int) -> dict[str, object]:
    """Return the manifest of a fake node with room for many pods: as much as all its GPUs may request."""
    name = node_name(index)
    resources = {
        "cpu": str(max(96, 2 * gpus)),
        "memory": f"{max(1024, 8 * gpus)}Gi",
        "pods": "250",
        "nvidia.com/gpu": str(gpus),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "kwok"},
        },
        "status": {"capacity": resources, "allocatable": resources},
    }


def daemon(state: Path, kubeconfig: Path, *, detached: bool) -> Daemon:
    """Return kwok as a program; with a configuration it has no built-in stages, so they are passed."""
    if not (stages := state / "stages.yaml").exists():
        stages.write_text(idempotent((binaries.bin_dir() / binaries.KWOK_STAGES).read_text()))
    command = [
        str(binaries.binary("kwok")),
        f"--kubeconfig={kubeconfig}",
        f"--config={stages}",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        "--node-lease-duration-seconds=40",
    ]
    return Daemon("kwok", command, state, detached=detached)


def idempotent(stages: str) -> str:
    """Return stages that make a pod ready as of its creation, by the second: on a busy machine kwok makes thousands of
    pods ready again, of which an API server tells all watches unless nothing changes.
    """
    node, mark, pod = stages.partition("name: pod-ready")
    return node + mark + pod.replace("{{ $now := Now }}", "{{ $now := .metadata.creationTimestamp }}", 1)
