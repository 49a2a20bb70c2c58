"""A whole job on real kubelets, through the chart, the operator's pod and the trainer's pods.

Asserted: ranks of uneven pods on two nodes train to a checkpoint, and the pods are gone in the end; a secret that does
not exist is named while the kubelet waits for it, and a model that does not exist fails the job, which names its field;
an image that the container runtime finds no `python` in ends the job without a restart.
"""

import json

import pytest

from grpo_devcluster.progress import wait_until

pytestmark = pytest.mark.timeout(1200)

PLAIN = {"topology": "Colocate", "engine": "Transformers"}


def test_two_and_one_ranks_on_two_nodes_train_to_a_checkpoint(job):
    data = job.apply(generation=PLAIN)
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


def test_a_secret_and_a_model_that_do_not_exist_are_named_by_the_job(job):
    """The kubelet waits for the secret, which the job says; the model ends the job."""
    keys = {"name": "keys", "secret": {"secretName": "keys"}}
    mounts = {"volumes": [keys], "volumeMounts": [{"name": "keys", "mountPath": "/keys"}]}
    one = {"groups": [{"name": "a", "gpus": 1}]}
    job.apply(model={"path": "/data/nothing"}, generation=PLAIN, trainer=one, podTemplate=mounts)
    missing = 'secret "keys" not found'
    wait_until(lambda: missing in job("get", "grpojob", "tiny", "-o", "wide"), "the job names its secret", 120)
    job("create", "secret", "generic", "keys", "--from-literal=a=b")
    status = job.wait_for("Failed", 300)
    assert status["lastFailure"]["reason"] == "ConfigError"
    assert "model.path" in status["lastFailure"]["message"]
    assert "/data/nothing" in status["lastFailure"]["message"]
    wait_until(lambda: not json.loads(job("get", "pods", "-o", "json"))["items"], "pods of the ended job are gone", 120)


def test_an_image_without_python_ends_the_job_without_a_restart(job):
    nothing = {"env": [{"name": "PATH", "value": "/nowhere"}]}  # as in such an image: the runtime finds no program
    job.apply(generation=PLAIN, trainer={"groups": [{"name": "a", "gpus": 1}]}, podTemplate=nothing)
    status = job.wait_for("Failed", 120)
    assert (status["lastFailure"]["reason"], status["restarts"]["total"]) == ("ConfigError", 0)
    assert "spec.image does not hold the programs of this release" in status["lastFailure"]["message"]
    assert 'exec: "python": executable file not found' in status["lastFailure"]["message"]
