"""Volumes: folders of this machine behind a default storage class, so that a plain claim binds."""

import shutil
from pathlib import Path
from typing import Any

from grpo_devcluster import kube

CLASS = "devcluster-hostpath"
LABEL = "grpo.local/devcluster-volume"
VOLUMES = 16


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Return the storage class and its volumes, which are truly ReadWriteMany because every node is this machine."""
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS, "annotations": default},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
    return [storage_class, *(_volume(folder / f"pv{i:02d}") for i in range(VOLUMES))]


def _volume(path: Path) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"devcluster-{path.name}", "labels": {LABEL: "true"}},
        "spec": {
            "storageClassName": CLASS,
            "capacity": {"storage": "100Gi"},
            "accessModes": ["ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }


def prepare(folder: Path, *, fresh: bool) -> None:
    """Create the folders; empty those of an earlier cluster if this one is `fresh`."""
    for index in range(VOLUMES):
        path = folder / f"pv{index:02d}"
        if fresh:
            shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, exist_ok=True)
        # Pods run as any user, and Kubernetes does not apply a pod's fsGroup to a host folder.
        path.chmod(0o777)


def recycle(kubeconfig: Path) -> None:
    """Empty the volumes whose claim was deleted and offer them again: no controller does that for host folders."""
    api = kube.core(kubeconfig)
    for volume in api.list_persistent_volume(label_selector=LABEL).items:
        if volume.status.phase in {"Released", "Failed"}:
            path = Path(volume.spec.host_path.path)
            shutil.rmtree(path)
            path.mkdir()
            path.chmod(0o777)
            api.patch_persistent_volume(volume.metadata.name, {"spec": {"claimRef": None}})


def claim_path(kubeconfig: Path, namespace: str, claim: str) -> Path:
    """Return the folder of this machine behind a bound claim."""
    api = kube.core(kubeconfig)
    volume = api.read_namespaced_persistent_volume_claim(claim, namespace).spec.volume_name
    if not volume:
        raise LookupError(f"claim {namespace}/{claim} is not bound to a volume yet")
    return Path(api.read_persistent_volume(volume).spec.host_path.path)
