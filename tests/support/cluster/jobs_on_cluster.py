"""A tiny GRPOJob on the cluster: apply it, follow it, and read its results from the folder behind its claim."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from grpo_devcluster import storage
from grpo_devcluster.progress import wait_until
from support.trainer.tiny_model import make_tiny_model

SELECTOR = "training.grpo.dev/job=tiny"


def _manifests(**spec: Any) -> str:
    shared = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}, "spec": shared}
    training = {"promptsPerStep": 3, "numGenerations": 4, "maxSteps": 2, "maxCompletionLength": 8, "learningRate": 1e-3}
    fields: dict[str, Any] = {
        "device": {"type": "cpu", "resourceName": "nvidia.com/gpu"},
        "model": {"path": "/data/model", "dtype": "float32"},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic", "params": {"min_terms": 2, "max_terms": 2}}},
        "rewards": [{"name": "stopped", "stopped": {}}],
        "training": training,
        "generation": {"maxModelLen": 256, "kvCacheMemory": "16Mi", "engineArgs": {"enforce_eager": True}},
        "trainer": {"groups": [{"name": "a", "gpus": 2}, {"name": "b", "gpus": 1}]},
        "storage": {"claimName": "runs"},
    } | spec
    template = fields.get("podTemplate", {})
    quick = {"name": "TORCHDYNAMO_DISABLE", "value": "1"}  # as tests/conftest.py
    fields["podTemplate"] = template | {"env": [*template.get("env", []), quick]}
    kind = {"apiVersion": "training.grpo.dev/v1alpha1", "kind": "GRPOJob"}
    return yaml.safe_dump_all([claim, kind | {"metadata": {"name": "tiny"}, "spec": fields}])


class JobOnCluster:
    """The job of one namespace."""

    def __init__(self, kubectl: Any, kubeconfig: Path, namespace: str) -> None:
        self.kubectl, self.kubeconfig, self.namespace = kubectl, kubeconfig, namespace

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        return str(self.kubectl("-n", self.namespace, *args, stdin=stdin))

    def apply(self, *, files: Mapping[str, str] = MappingProxyType({}), **spec: Any) -> Path:
        """Apply claim and job; model and `files` are behind the claim before a pod starts. Return its folder."""
        claim, job = yaml.safe_load_all(_manifests(**spec))
        self("apply", "-f", "-", stdin=yaml.safe_dump(claim))
        self("wait", "pvc/runs", "--for=jsonpath={.status.phase}=Bound", "--timeout=120s")
        data = storage.claim_path(self.kubeconfig, self.namespace, "runs")
        make_tiny_model(data / "model")
        for name, text in files.items():
            (data / name).write_text(text)
        self("apply", "-f", "-", stdin=yaml.safe_dump(job))
        return data

    def get(self) -> dict[str, Any]:
        """Return the job."""
        found: dict[str, Any] = json.loads(self("get", "grpojob", "tiny", "-o", "json"))
        return found

    def get_pod(self, name: str) -> dict[str, Any]:
        """Return a pod of the job, or {} while it does not exist."""
        pods = json.loads(self("get", "pods", "-o", "json"))["items"]
        return next((pod for pod in pods if pod["metadata"]["name"] == name), {})

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Return the job's conditions by type."""
        return {c["type"]: c for c in self.get().get("status", {}).get("conditions", [])}

    def wait_for(self, kind: str, timeout: float) -> dict[str, Any]:
        """Wait until a condition is True and return the status; fail if the job ends with another condition."""

        def settled() -> bool:
            conditions = self.conditions()
            return any(conditions.get(each, {}).get("status") == "True" for each in {kind, "Complete", "Failed"})

        wait_until(settled, f"{kind} of the job", timeout, interval=0.5)
        status = self.get()["status"]
        assert self.conditions().get(kind, {}).get("status") == "True", json.dumps(status, indent=1)
        return dict(status)

    def metrics(self, data: Path) -> list[dict[str, Any]]:
        """Return the trainer's metrics, one row a step."""
        file = data / self.namespace / "tiny" / self.get()["metadata"]["uid"] / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    def replicas(self) -> list[int]:
        """Return the replicas of each StatefulSet."""
        return [
            s["spec"]["replicas"] for s in json.loads(self("get", "statefulset", "-l", SELECTOR, "-o", "json"))["items"]
        ]
