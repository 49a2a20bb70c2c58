"""Faults on real kubelets: every one is recovered from, or ends the job with its cause. Each test prints how long a recovery took."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs_on_cluster import SELECTOR, JobOnCluster
from surface import SECRET, check_surface

from grpo_devcluster.cluster import Cluster
from grpo_devcluster.progress import wait_until
from grpo_workload.journal import read_lineage

pytestmark = pytest.mark.e2e

REWARD = """
import os, pathlib, time

DATA = pathlib.Path("/data")

def score(completions, completion_ids, **_):
    if (DATA / "slow").exists():
        time.sleep(1)  # the job must outlast its faults
    hog = DATA / f"hog-{os.environ['RANK']}"
    if hog.exists():
        hog.unlink()
        eaten = [b"x" * 2**26 for _ in range(2**10)]
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]
"""
STEPS = 150
TRAINING = {"promptsPerStep": 3, "numGenerations": 4, "maxSteps": STEPS, "maxCompletionLength": 8, "learningRate": 1e-3}
PLAIN = {"topology": "Colocate", "engine": "Transformers"}
KILL = (
    "import os, signal, pathlib; [os.kill(int(p.name), signal.SIGKILL) for p in pathlib.Path('/proc').iterdir()"
    " if p.name.isdigit() and b'{what}' in (p / 'cmdline').read_bytes() and int(p.name) != os.getpid()]"
)


class Survivor:
    """A job that is hit again and again."""

    def __init__(self, job: JobOnCluster) -> None:
        self.job = job
        self.recoveries: dict[str, float] = {}

    def status(self) -> dict[str, Any]:
        return dict(self.job.get().get("status", {}))

    def steps(self, above: int, timeout: float = 360) -> None:
        """Wait until training stands above a step."""

        def moved() -> bool:
            status = self.status()
            assert status["phase"] not in ("Failed", "Succeeded"), json.dumps(status, indent=1)
            progress = status.get("progress", {"step": 0, "time": ""})
            return int(progress["step"]) > above and progress["time"] > status["epochStartTime"]

        wait_until(moved, f"a step above {above}", timeout, interval=0.5)

    def kill(self, pod: str, what: str) -> None:
        """SIGKILL processes of a pod by a part of their command line; `kubectl exec` runs as the pod's user."""
        self.job("exec", pod, "--", "python", "-c", KILL.format(what=what))

    @contextmanager
    def recovers(self, fault: str, reason: str | None) -> Iterator[None]:
        """What is done inside ends the attempt; the next one makes steps, and `reason` is what is told of the last."""
        before = self.status()
        began = time.monotonic()
        yield
        wait_until(lambda: self.status()["epoch"] > before["epoch"], f"another attempt after: {fault}", 240, interval=0.2)
        wait_until(lambda: self.status()["phase"] == "Running", f"running after: {fault}", 360, interval=0.5)
        self.recoveries[fault] = time.monotonic() - began
        status = self.status()
        assert status["epoch"] == before["epoch"] + 1, json.dumps(status, indent=1)
        assert reason in (None, status["lastFailure"]["reason"]), json.dumps(status["lastFailure"], indent=1)
        self.steps(status.get("progress", {}).get("checkpointStep", 0))


@pytest.fixture
def survivor(job: JobOnCluster) -> Iterator[Survivor]:
    made = Survivor(job)
    yield made
    print("recovered in seconds:", json.dumps({fault: round(seconds, 1) for fault, seconds in made.recoveries.items()}))  # noqa: T201


def _apply(job: JobOnCluster, **spec: Any) -> Path:
    data = job.apply(
        files={"chaos.py": REWARD, "slow": ""},
        **{
            "training": TRAINING,
            "generation": PLAIN,
            "rewards": [{"name": "even", "function": "chaos:score"}],
            "storage": {"claimName": "runs", "checkpointEverySteps": 5},
            "podTemplate": {
                "env": [{"name": "PYTHONPATH", "value": "/data"}, {"name": "CHAOS_TOKEN", "value": SECRET}],
                "resources": {"limits": {"memory": "3Gi"}},
                "terminationGracePeriodSeconds": 60,
            },
            "failurePolicy": {"backoffSeconds": 0, "maxRestarts": 20},
        }
        | spec,
    )
    job.wait_for("Running", 300)
    return data


@pytest.mark.timeout(1800)
def test_a_job_survives_what_happens_to_processes_pods_children_and_the_operator(survivor: Survivor, devcluster: Cluster) -> None:
    job = survivor.job
    data = _apply(job)
    survivor.steps(5)

    with survivor.recovers("SIGKILL of a rank", "RankFailed"):
        survivor.kill("tiny-b-0", "grpo_workload.train")
    assert "rank 2 was killed by SIGKILL" in survivor.status()["lastFailure"]["message"]

    with survivor.recovers("a rank beyond the memory limit", "RankFailed"):
        (data / "hog-2").write_text("")
    assert "ran out of memory: raise podTemplate.resources.limits.memory" in survivor.status()["lastFailure"]["message"]

    with survivor.recovers("SIGKILL of a launcher", None):
        survivor.kill("tiny-a-0", "grpo_workload.launch")
    assert survivor.status()["lastFailure"]["pod"] == "tiny-a-0"

    step = survivor.status()["progress"]["step"]
    with survivor.recovers("kubectl delete pod", "PodReplaced"):
        job("delete", "pod", "tiny-b-0")
    assert survivor.status()["progress"]["step"] >= step, "a pod that is asked to end saves first: nothing is lost"

    with survivor.recovers("kubectl delete statefulset", "PodReplaced"):
        job("delete", "statefulset", "tiny-a", "--wait=false")

    with survivor.recovers("the operator's pod killed in the middle of a restart", "RankFailed"):
        survivor.kill("tiny-a-0", "grpo_workload.train")
        job.wait_for("Restarting", 120)
        job.kubectl("delete", "pod", "-n", "grpo-system", "-l", "app.kubernetes.io/name=grpo-operator", "--force", "--grace-period=0")

    before = survivor.status()
    job("delete", "service,configmap,networkpolicy", "-l", SELECTOR)
    wait_until(
        lambda: len(job("get", "service,configmap,networkpolicy", "-l", SELECTOR, "-o", "name").split()) == 3, "children are back", 60
    )
    (apiserver,) = [daemon for daemon in devcluster.daemons() if "apiserver" in daemon.name]
    apiserver.stop(grace=0)
    away = time.monotonic()
    wait_until(lambda: time.monotonic() - away > 20, "20 s without an API server", 30)
    apiserver.start()
    wait_until(lambda: _answers(job), "the API server is back", 120)
    survivor.steps(before["progress"]["step"])
    assert survivor.status()["epoch"] == before["epoch"], "neither ends an attempt"

    (data / "slow").unlink()
    status = job.wait_for("Complete", 600)
    assert status["progress"]["step"] == STEPS
    assert [line["step"] for line in job.metrics(data)] == list(range(STEPS))
    run = data / job.namespace / "tiny" / job.get()["metadata"]["uid"]
    assert [groups[0].step for groups in read_lineage(run)] == list(range(STEPS)), "every step once and in order"
    assert status["restarts"]["total"] == 6
    wait_until(lambda: job.replicas() == [0, 0], "StatefulSets at 0", 60)
    wait_until(lambda: not job("get", "pods", "-o", "name"), "no pod is left", 180)
    assert len(job("get", "configmap", "-l", SELECTOR, "-o", "name").split()) == 1


@pytest.mark.timeout(1200)
def test_ranks_whose_network_is_cut_end_and_publish_nothing_beside_the_next_attempt(survivor: Survivor) -> None:
    """Rank 0's pod, on a node that lives: it reaches the storage and nobody else."""
    job = survivor.job
    data = _apply(job)
    survivor.steps(5)
    before = survivor.status()
    with survivor.recovers("the network of a pod cut", "PeerLost"):
        _cut_network(job.get_pod("tiny-a-0")["metadata"]["uid"])
    (data / "slow").unlink()
    status = job.wait_for("Complete", 600)
    assert status["restarts"]["total"] == 1
    assert "has not answered for" in status["lastFailure"]["message"], status["lastFailure"]
    lineage = [groups[0].step for groups in read_lineage(data / job.namespace / "tiny" / job.get()["metadata"]["uid"])]
    assert lineage == list(range(STEPS))
    assert status["progress"]["step"] == STEPS > before["progress"]["step"]


@pytest.mark.timeout(1200)
def test_a_suspended_job_saves_and_goes_on_with_another_number_of_ranks(survivor: Survivor) -> None:
    job = survivor.job
    data = _apply(job, storage={"claimName": "runs", "checkpointEverySteps": 1000})
    survivor.steps(3)
    check_surface(job)
    job("patch", "grpojob", "tiny", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    wait_until(lambda: job.conditions().get("Suspended", {}).get("reason") == "Suspended", "all pods saved and ended", 240, interval=0.5)
    assert not job("get", "pods", "-o", "name")
    run = data / job.namespace / "tiny" / job.get()["metadata"]["uid"]
    (saved,) = (run / "checkpoints").glob("step-*")
    steps = len(job.metrics(data))
    assert saved.name == f"step-{steps}", "every step that was made was saved"

    (data / "slow").unlink()
    shape = {"suspend": False, "trainer": {"groups": [{"name": "b", "replicas": 1, "gpus": 1}]}}
    job("patch", "grpojob", "tiny", "--type=merge", "-p", json.dumps({"spec": shape}))
    status = job.wait_for("Complete", 600)
    assert (status["epoch"], status["restarts"]["total"]) == (1, 0)
    assert [member["pod"] for member in status["members"]] == ["tiny-b-0"]
    assert [line["step"] for line in job.metrics(data)] == list(range(STEPS))
    assert [groups[0].step for groups in read_lineage(run)] == list(range(STEPS))


def _cut_network(pod_uid: str) -> None:
    """Take a pod's interface down, in its network namespace."""
    mark = f"POD_UID={pod_uid}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if mark in variables:
            subprocess.run(["nsenter", "--target", process.name, "--net", "ip", "link", "set", "eth0", "down"], check=True)
            return
    raise LookupError(f"no process has the variables of pod uid {pod_uid}")


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_an_engine_that_dies_comes_back_and_the_trainer_never_restarts(survivor: Survivor) -> None:
    job = survivor.job
    engines = {"topology": "Server", "server": {"groups": [{"name": "gen", "replicas": 2, "gpus": 1}]}}
    vllm = {"maxModelLen": 256, "kvCacheMemory": "16Mi", "engineArgs": {"enforce_eager": True}}
    data = job.apply(
        files={"chaos.py": REWARD, "slow": ""},
        device={"type": "cpu"},
        rewards=[{"name": "even", "function": "chaos:score"}],
        training=TRAINING | {"maxSteps": 100_000},
        generation=engines | vllm,
        trainer={"groups": [{"name": "a", "gpus": 1}]},
        podTemplate={"env": [{"name": "PYTHONPATH", "value": "/data"}], "terminationGracePeriodSeconds": 30},
        failurePolicy={"onGenerationFailure": "RestartGeneration"},
    )
    job.wait_for("Running", 600)
    survivor.steps(2)
    trainer = job.get_pod("tiny-a-0")["metadata"]["uid"]
    dead = job.get_pod("tiny-gen-1")["metadata"]["uid"]
    began = time.monotonic()
    survivor.kill("tiny-gen-1", "vllm.entrypoints")
    wait_until(lambda: job.get_pod("tiny-gen-1").get("metadata", {}).get("uid") not in (None, dead), "another pod of the engine", 240)
    wait_until(lambda: survivor.status()["phase"] == "Running", "the engine is ready again", 480)
    survivor.recoveries["an engine killed"] = time.monotonic() - began
    status = survivor.status()
    survivor.steps(status["progress"]["step"] + 5)
    status = survivor.status()
    assert (status["epoch"], status["restarts"]["total"]) == (0, 1)
    assert {group["name"]: group["incarnation"] for group in status["groups"]} == {"a": 0, "gen": 1}
    assert (status["lastFailure"]["pod"], status["lastFailure"]["reason"]) == ("tiny-gen-1", "EngineDied")
    assert job.get_pod("tiny-a-0")["metadata"]["uid"] == trainer
    steps = job.metrics(data)
    assert [line["step"] for line in steps] == list(range(len(steps)))
    # Both engines sample from the trained policy again.
    assert steps[-1]["sampling/sampling_logp_difference/max"] < 1e-4


def _answers(job: JobOnCluster) -> bool:
    try:
        job("get", "grpojob")
    except RuntimeError:
        return False
    return True


@pytest.mark.timeout(1200)
def test_ranks_of_a_lost_node_are_fenced_and_the_job_goes_on_elsewhere(survivor: Survivor, devcluster: Cluster) -> None:
    """The node's pods live on unseen, and write to the same storage: the claim ends them."""
    job = survivor.job
    on_b = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"]}
    affinity = {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchExpressions": [on_b]}}]}
    }
    data = _apply(
        job,
        trainer={"groups": [{"name": "a", "gpus": 1}]},
        training=TRAINING | {"maxSteps": 100_000},
        failurePolicy={"backoffSeconds": 0, "nodeLostSeconds": 5},
        podTemplate={"env": [{"name": "PYTHONPATH", "value": "/data"}], "affinity": affinity},
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
        run = data / job.namespace / "tiny" / job.get()["metadata"]["uid"]
        before = status["progress"]["step"]
        survivor.steps(before + 10)
        steps = [line["step"] for line in job.metrics(data)]
        assert steps == list(range(len(steps))), "two writers would have mixed their steps"
        assert len(list(run.rglob("claims/*"))) == 2
    finally:
        devcluster.start_node("b")
