"""A whole job on real kubelets: from `kubectl apply` to a checkpoint, through the chart, the operator's pod and the trainer's pods."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster import storage
from grpo_devcluster.progress import wait_until
from grpo_workload.tiny import make_tiny_model

pytestmark = pytest.mark.e2e

SELECTOR = "training.grpo.dev/job=tiny"


def _manifests(**spec: Any) -> str:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "runs"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    job = {
        "apiVersion": "training.grpo.dev/v1alpha1",
        "kind": "GRPOJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "device": {"type": "cpu", "resourceName": "nvidia.com/gpu"},
            "model": {"path": "/data/model", "dtype": "float32"},
            "dataset": {"reasoningGym": {"dataset": "basic_arithmetic", "params": {"min_terms": 2, "max_terms": 2}}},
            "rewards": [{"name": "stopped", "stopped": {}}],
            "training": {"promptsPerStep": 3, "numGenerations": 4, "maxSteps": 2, "maxCompletionLength": 8, "learningRate": 1e-3},
            "generation": {"maxModelLen": 256, "kvCacheMemory": "16Mi", "engineArgs": {"enforce_eager": True}},
            "trainer": {"groups": [{"name": "a", "gpus": 2}, {"name": "b", "gpus": 1}]},
            "storage": {"claimName": "runs"},
        }
        | spec,
    }
    return yaml.safe_dump_all([claim, job])


class JobOnCluster:
    """The job of one namespace."""

    def __init__(self, kubectl: Any, kubeconfig: Path, namespace: str) -> None:
        self.kubectl, self._kubeconfig, self.namespace = kubectl, kubeconfig, namespace

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        return str(self.kubectl("-n", self.namespace, *args, stdin=stdin))

    def apply(self, **spec: Any) -> Path:
        """Apply claim and job; the model is put behind the claim before a pod can look. Returns the claim's folder."""
        claim, job = yaml.safe_load_all(_manifests(**spec))
        self("apply", "-f", "-", stdin=yaml.safe_dump(claim))
        self("wait", "pvc/runs", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
        data = storage.claim_path(self._kubeconfig, self.namespace, "runs")
        make_tiny_model(data / "model")
        self("apply", "-f", "-", stdin=yaml.safe_dump(job))
        return data

    def get(self) -> dict[str, Any]:
        """The job."""
        found: dict[str, Any] = json.loads(self("get", "grpojob", "tiny", "-o", "json"))
        return found

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Its conditions by type."""
        return {c["type"]: c for c in self.get().get("status", {}).get("conditions", [])}

    def wait_for(self, kind: str, timeout: float) -> dict[str, Any]:
        """Wait until a condition is True; another end of the job ends the wait."""

        def settled() -> bool:
            conditions = self.conditions()
            return any(conditions.get(each, {}).get("status") == "True" for each in {kind, "Complete", "Failed"})

        wait_until(settled, f"{kind} of the job", timeout, interval=0.5)
        status = self.get()["status"]
        assert self.conditions().get(kind, {}).get("status") == "True", json.dumps(status, indent=1)
        return dict(status)

    def replicas(self) -> list[int]:
        """Scale of its StatefulSets."""
        return [s["spec"]["replicas"] for s in json.loads(self("get", "statefulset", "-l", SELECTOR, "-o", "json"))["items"]]


@pytest.fixture
def job(operator: None, kubectl: Any, cluster: Path, namespace: str) -> JobOnCluster:
    """A namespace with an operator at work."""
    return JobOnCluster(kubectl, cluster, namespace)


def test_two_and_one_ranks_on_two_nodes_train_to_a_checkpoint(job: JobOnCluster) -> None:
    data = job.apply()
    status = job.wait_for("Complete", 240)
    assert status["phase"] == "Succeeded"
    assert {m["pod"]: m["node"] for m in status["members"]} == {"tiny-a-0": "node-a", "tiny-b-0": "node-b"}
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 2
    assert status["summary"]["step"] == "2/2"
    wait_until(lambda: job.replicas() == [0, 0], "StatefulSets at 0", 5)
    assert (data / status["checkpoint"] / "model" / "model.safetensors").is_file()
    run = data / job.namespace / "tiny" / job.get()["metadata"]["uid"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert all("grad_norm" in step and "reward" in step for step in steps)


def test_a_killed_rank_fails_the_job_and_is_named(job: JobOnCluster) -> None:
    job.apply(training={"promptsPerStep": 3, "numGenerations": 4, "maxSteps": 100_000, "maxCompletionLength": 8})
    job.wait_for("Running", 120)
    # `kubectl exec` runs as the pod's user, so it may only signal the pod's own processes.
    victim = "import os, signal, pathlib; [os.kill(int(p.name), signal.SIGKILL) for p in pathlib.Path('/proc').iterdir()" + (
        " if p.name.isdigit() and b'grpo_workload.train' in (p / 'cmdline').read_bytes() and int(p.name) != os.getpid()]"
    )
    job("exec", "tiny-b-0", "--", "python", "-c", victim)
    status = job.wait_for("Failed", 60)
    failure = status["lastFailure"]
    assert (failure["pod"], failure["node"], failure["reason"]) == ("tiny-b-0", "node-b", "RankFailed")
    assert "rank 2 was killed by SIGKILL" in failure["message"]
    wait_until(lambda: job.replicas() == [0, 0], "StatefulSets at 0", 5)


def test_a_model_that_is_not_there_is_told_with_its_field(job: JobOnCluster) -> None:
    job.apply(model={"path": "/data/nothing"})
    status = job.wait_for("Failed", 120)
    assert status["lastFailure"]["reason"] == "ConfigError"
    assert "model.path" in status["lastFailure"]["message"]
    assert "/data/nothing" in status["lastFailure"]["message"]
    wait_until(lambda: not json.loads(job("get", "pods", "-o", "json"))["items"], "pods of the ended job are gone", 30)
