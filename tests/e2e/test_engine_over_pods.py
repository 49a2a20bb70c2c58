"""An engine whose layers are divided over two pods on two real kubelets, and the loss of the second pod.

Asserted: the job trains with what both pods sample; after the second pod's vLLM is killed, `lastFailure` names this pod
and not the first, both are replaced while the attempt goes on, and the engine samples from the trained policy again.
"""

import json
from typing import Any

import pytest

from grpo_devcluster.progress import wait_until
from support.cluster.survivors import REWARDS, Survivor

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

APART = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": {"training.grpo.dev/role": "generation"}},
        }
    ]
}
TRAINING: dict[str, Any] = {
    "promptsPerStep": 2,
    "numGenerations": 4,
    "maxSteps": 12,
    "maxCompletionLength": 8,
    "learningRate": 1e-3,
    "lrSchedulerType": "constant",
}


def test_a_killed_follower_is_named_and_its_engine_alone_is_replaced(job):
    survivor = Survivor(job)
    pods = {"podTemplate": {"affinity": {"podAntiAffinity": APART}}}
    engine = {"name": "w", "gpus": 1, "replicas": 2, "podsPerEngine": 2} | pods
    vllm: dict[str, Any] = {"maxModelLen": 256, "kvCacheMemory": "16Mi", "engineArgs": {"enforce_eager": True}}
    survivor.apply(
        training=TRAINING,
        rewards=REWARDS,
        generation=vllm | {"topology": "Server", "server": {"groups": [engine]}},
        trainer={"groups": [{"name": "a", "gpus": 1}]},
        failurePolicy={"backoffSeconds": 1, "onGenerationFailure": "RestartGeneration"},
    )
    before = survivor.status()
    nodes = {one["pod"]: one["node"] for one in before["members"]}
    assert nodes["tiny-w-0"] != nodes["tiny-w-1"]
    survivor.steps(1)

    survivor.kill("tiny-w-1", "vllm_worker.follower")
    wait_until(lambda: "lastFailure" in survivor.status(), "the failure is named", 60, interval=0.5)
    failure = survivor.status()["lastFailure"]
    assert (failure["pod"], failure["reason"]) == ("tiny-w-1", "EngineDied"), json.dumps(failure, indent=1)
    assert "engine tiny-w-0 was killed by SIGKILL" in failure["message"]

    (survivor.data / "slow").unlink()
    status = job.wait_for("Complete", 400)
    assert status["attempt"] == before["attempt"] == 0
    assert status["restarts"] == {"total": 1, "counted": 1}
    uids = [{one["pod"]: one["uid"] for one in each["members"]} for each in (before, status)]
    assert {pod for pod in uids[0] if uids[0][pod] != uids[1][pod]} == {"tiny-w-0", "tiny-w-1"}
    rows = job.metrics(survivor.data)
    assert [row["step"] for row in rows] == list(range(TRAINING["maxSteps"]))
    assert all(row["trained/sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
