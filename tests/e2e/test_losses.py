"""An engine and a node are lost on real kubelets; each test prints how many seconds its recovery took.

Asserted: a killed engine comes back and samples from the trained policy while the trainer's pod stays; the ranks of a
lost node, which keep running although the cluster cannot see them, are fenced, and the job goes on at another node.
"""

import time
from collections.abc import Iterator

import pytest

from grpo_devcluster.cluster import Cluster
from grpo_devcluster.progress import wait_until
from support.cluster.jobs_on_cluster import JobOnCluster
from support.cluster.survivors import TRAINING, Survivor

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

ENDLESS = TRAINING | {"maxSteps": 100_000}
ONE_RANK = {"groups": [{"name": "a", "gpus": 1}]}
ENVIRONMENT = {"env": [{"name": "PYTHONPATH", "value": "/data"}]}


@pytest.fixture
def survivor(job: JobOnCluster) -> Iterator[Survivor]:
    made = Survivor(job)
    yield made
    made.report()


@pytest.mark.vllm
def test_an_engine_that_dies_comes_back_and_the_trainer_never_restarts(survivor: Survivor) -> None:
    job = survivor.job
    engines = {"topology": "Server", "server": {"groups": [{"name": "gen", "replicas": 2, "gpus": 1}]}}
    vllm = {"maxModelLen": 256, "kvCacheMemory": "16Mi", "engineArgs": {"enforce_eager": True}}
    survivor.apply(
        device={"type": "cpu"},
        training=ENDLESS,
        generation=engines | vllm,
        trainer=ONE_RANK,
        podTemplate=ENVIRONMENT | {"terminationGracePeriodSeconds": 10},
        failurePolicy={"onGenerationFailure": "RestartGeneration"},
    )
    survivor.steps(2)
    trainer = job.get_pod("tiny-a-0")["metadata"]["uid"]
    dead = job.get_pod("tiny-gen-1")["metadata"]["uid"]
    began = time.monotonic()
    survivor.kill("tiny-gen-1", "vllm.entrypoints")
    wait_until(
        lambda: job.get_pod("tiny-gen-1").get("metadata", {}).get("uid") not in (None, dead),
        "another pod of the engine",
        240,
    )
    wait_until(lambda: survivor.status()["phase"] == "Running", "the engine is ready again", 480)
    survivor.recoveries["an engine killed"] = time.monotonic() - began
    survivor.steps(survivor.status()["progress"]["step"] + 3)
    status = survivor.status()
    assert (status["attempt"], status["restarts"]["total"]) == (0, 1)
    assert {group["name"]: group["incarnation"] for group in status["groups"]} == {"a": 0, "gen": 1}
    assert (status["lastFailure"]["pod"], status["lastFailure"]["reason"]) == ("tiny-gen-1", "EngineDied")
    assert job.get_pod("tiny-a-0")["metadata"]["uid"] == trainer
    steps = job.metrics(survivor.data)
    assert [line["step"] for line in steps] == list(range(len(steps)))
    # Both engines sample from the trained policy again.
    assert steps[-1]["trained/sampling/sampling_logp_difference/max"] < 1e-4


def test_ranks_of_a_lost_node_are_fenced_and_the_job_goes_on_elsewhere(survivor: Survivor, devcluster: Cluster) -> None:
    """The node's pods keep running, unseen by the cluster, and write to the same storage: the fence ends them."""
    job = survivor.job
    on_b = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"]}
    preference = {"weight": 1, "preference": {"matchExpressions": [on_b]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}
    survivor.apply(
        trainer=ONE_RANK,
        training=ENDLESS,
        failurePolicy={"backoffSeconds": 0, "nodeLostSeconds": 5},
        podTemplate=ENVIRONMENT | {"affinity": affinity},
    )
    assert survivor.status()["members"][0]["node"] == "node-b"
    survivor.steps(5)
    node = devcluster.node("b")
    try:
        with survivor.recovers("a node without kubelet whose pods live on", "NodeLost"):
            node.stop(partition=True)
        status = survivor.status()
        assert status["members"][0]["node"] == "node-a"
        assert (status["restarts"]["total"], status["restarts"]["counted"]) == (1, 0)
        assert [one["name"] for one in status["avoidNodes"]] == ["node-b"]
        survivor.steps(status["progress"]["step"] + 5)
        steps = [line["step"] for line in job.metrics(survivor.data)]
        assert steps == list(range(len(steps))), "two writers would have mixed their steps"
        assert len(list(survivor.folder().rglob("fence/*"))) == 2
    finally:
        devcluster.start_node("b")
