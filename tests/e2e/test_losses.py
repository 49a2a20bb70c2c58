"""An engine and a node are lost on real kubelets; each test prints how many seconds its recovery took.

Asserted: an engine that is killed and comes back gets the trained weights while the trainer's pod stays, and leaves
when the operator finds that one is enough; the ranks of a lost node, which keep running although the cluster cannot see
them, are fenced, and the job goes on at another node.
"""

import json
import time
from statistics import median

import pytest

from grpo_devcluster.progress import wait_until
from support.cluster.survivors import TRAINING, Survivor

pytestmark = pytest.mark.timeout(1500)

ENDLESS = TRAINING | {"maxSteps": 100_000}
ONE_RANK = {"groups": [{"name": "a", "gpus": 1}]}
ENVIRONMENT = {"env": [{"name": "PYTHONPATH", "value": "/data"}]}


@pytest.fixture
def survivor(job):
    made = Survivor(job)
    yield made
    made.report()


@pytest.mark.vllm
def test_engines_die_return_and_leave_and_the_trainer_never_restarts(survivor):
    job = survivor.job
    elastic = {"groups": [{"name": "gen", "gpus": 1}], "elastic": {"replicas": 2, "maxReplicas": 2}}
    vllm = {"maxModelLen": 256, "kvCacheMemory": "16Mi", "engineArgs": {"enforce_eager": True}}
    survivor.apply(
        device={"type": "cpu"},
        training=ENDLESS | {"maxStaleness": 1},  # so requests are in flight whenever it dies
        generation={"topology": "Server", "server": elastic} | vllm,
        trainer=ONE_RANK,
        podTemplate=ENVIRONMENT | {"terminationGracePeriodSeconds": 10},
        failurePolicy={"onGenerationFailure": "RestartGeneration"},
    )

    def sampled_by(engines):
        steps = job.metrics(survivor.data)
        return bool(steps) and steps[-1]["engines/count"] == engines

    survivor.steps(2)
    wait_until(lambda: sampled_by(2), "steps with both engines", 480)
    trainer = job.get_pod("tiny-a-0")["metadata"]["uid"]
    dead = job.get_pod("tiny-gen-1")["metadata"]["uid"]
    began = time.monotonic()
    survivor.kill("tiny-gen-1", "vllm.entrypoints")
    wait_until(lambda: sampled_by(1), "steps without it", 60, interval=0.2)
    wait_until(lambda: sampled_by(2), "steps with the engine's next pod, which joins as any new one", 480)
    survivor.recoveries.append(("an engine killed", time.monotonic() - began))
    assert job.get_pod("tiny-gen-1")["metadata"]["uid"] != dead
    status = survivor.status()
    assert (status["attempt"], status["restarts"]["total"], "lastFailure" in status) == (0, 0, False)
    assert {group["name"]: group["incarnation"] for group in status["groups"]} == {"a": 0, "gen": 1}
    assert {member["pod"]: member.get("failures", 0) for member in status["members"]}["tiny-gen-1"] == 1

    # Each reward takes a second, so one engine would do. At last, the operator may act on it.
    wait_until(lambda: survivor.status()["progress"]["metrics"].get("engines/balanced") == 1, "the number", 240)
    wait_until(lambda: "run 1 engine in place of 2" in survivor.status()["progress"].get("advice", ""), "advice", 240)
    change = {"spec": {"generation": {"server": {"elastic": {"minReplicas": 1}}}}}
    job("patch", "grpojob", "tiny", "--type=merge", "-p", json.dumps(change))
    wait_until(lambda: sampled_by(1), "steps of the first engine alone", 120)
    survivor.steps(survivor.status()["progress"]["step"] + 3)
    assert job.get()["spec"]["generation"]["server"]["elastic"]["replicas"] == 1
    status = survivor.status()
    assert (status["phase"], status["attempt"], status["restarts"]["total"]) == ("Running", 0, 0)
    assert job.get_pod("tiny-a-0")["metadata"]["uid"] == trainer
    steps = job.metrics(survivor.data)
    assert [line["step"] for line in steps] == list(range(len(steps)))
    # All engines sample from the trained policy, as it was at most one update ago.
    assert {line["staleness/max"] for line in steps[1:]} == {1}
    name = "trained/sampling/sampling_logp_difference/mean"  # of steps whose rewards differ
    differences = {
        engines: [line[name] for line in steps if name in line and line["engines/count"] == engines]
        for engines in (1, 2)
    }
    assert all(0 < median(seen) < 0.05 and max(seen) < 0.3 for seen in differences.values()), differences


def test_ranks_of_a_lost_node_are_fenced_and_the_job_goes_on_elsewhere(survivor, devcluster):
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
