"""A whole job on real kubelets: from `kubectl apply` to a checkpoint, through the chart, the operator's pod and the trainer's pods."""

import json

import pytest
from jobs_on_cluster import JobOnCluster

from grpo_devcluster.progress import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def test_two_and_one_ranks_on_two_nodes_train_to_a_checkpoint(job: JobOnCluster) -> None:
    data = job.apply()
    status = job.wait_for("Complete", 600)
    assert status["phase"] == "Succeeded"
    assert {m["pod"]: m["node"] for m in status["members"]} == {"tiny-a-0": "node-a", "tiny-b-0": "node-b"}
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 2
    assert status["summary"]["step"] == "2/2"
    wait_until(lambda: job.replicas() == [0, 0], "StatefulSets at 0", 60)
    assert (data / status["checkpoint"] / "model" / "model.safetensors").is_file()
    steps = job.metrics(data)
    assert len(steps) == 2
    assert all("grad_norm" in step and "reward" in step for step in steps)


def test_a_killed_rank_fails_the_job_and_is_named(job: JobOnCluster) -> None:
    endless = {"promptsPerStep": 3, "numGenerations": 4, "maxSteps": 100_000, "maxCompletionLength": 8}
    job.apply(training=endless, failurePolicy={"maxRestarts": 0})
    job.wait_for("Running", 300)
    # `kubectl exec` runs as the pod's user, so it may only signal the pod's own processes.
    victim = "import os, signal, pathlib; [os.kill(int(p.name), signal.SIGKILL) for p in pathlib.Path('/proc').iterdir()" + (
        " if p.name.isdigit() and b'grpo_workload.train' in (p / 'cmdline').read_bytes() and int(p.name) != os.getpid()]"
    )
    job("exec", "tiny-b-0", "--", "python", "-c", victim)
    status = job.wait_for("Failed", 180)
    failure = status["lastFailure"]
    assert (failure["pod"], failure["node"], failure["reason"]) == ("tiny-b-0", "node-b", "RankFailed")
    assert "rank 2 was killed by SIGKILL" in failure["message"]
    wait_until(lambda: job.replicas() == [0, 0], "StatefulSets at 0", 60)


def test_a_model_that_is_not_there_is_told_with_its_field(job: JobOnCluster) -> None:
    job.apply(model={"path": "/data/nothing"})
    status = job.wait_for("Failed", 300)
    assert status["lastFailure"]["reason"] == "ConfigError"
    assert "model.path" in status["lastFailure"]["message"]
    assert "/data/nothing" in status["lastFailure"]["message"]
    wait_until(lambda: not json.loads(job("get", "pods", "-o", "json"))["items"], "pods of the ended job are gone", 120)
