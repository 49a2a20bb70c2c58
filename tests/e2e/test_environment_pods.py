"""An agent's environments on pods of their own, on real kubelets.

Asserted: a pod that is deleted while episodes play costs second tries of them, and no attempt; environment pods are
gone after the end; a module that does not exist ends the job before a GPU is asked for, with the pod's message.
"""

import json
from typing import Any

import pytest

from grpo_devcluster.progress import wait_until
from support.trainer.tool_template import TOOL_TEMPLATE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

GAME = """
import time

class Game:
    def reset(self, **row):
        print("an episode begins", flush=True)
        time.sleep(3)

    def move(self, far: int) -> str:
        \"\"\"
        Move.

        Args:
            far: How far.
        \"\"\"
        return "moved"

    def get_reward(self):
        return 1.0
"""

CODE = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"game.py": GAME}}
BOXES: dict[str, Any] = {
    "name": "boxes",
    "replicas": 2,
    "podTemplate": {
        "env": [{"name": "PYTHONPATH", "value": "/code"}],
        "volumes": [{"name": "code", "configMap": {"name": "code"}}],
        "volumeMounts": [{"name": "code", "mountPath": "/code"}],
    },
}


def _environments(factory):
    return {"environments": [{"name": "game", "factory": factory, "memoryLimit": "2Gi"}]}


def test_a_deleted_pod_costs_no_attempt_and_a_wrong_module_ends_the_job(job):
    job("apply", "-f", "-", stdin=json.dumps(CODE))
    data = job.apply(
        device={"type": "cpu"},
        model={"path": "/data/model", "dtype": "float32", "chatTemplate": TOOL_TEMPLATE},
        rewards=[{"name": "stopped", "stopped": {}}, {"name": "game", "environment": {}}],
        generation={"maxModelLen": 384, "kvCacheMemory": "16Mi", "engineArgs": {"enforce_eager": True}},
        trainer={"groups": [{"name": "a", "gpus": 1}]},
        environmentPods={"groups": [BOXES]},
        **_environments("game:Game"),
    )
    _apply_broken(job)

    wait_until(lambda: "an episode begins" in _log(job, "tiny-boxes-0"), "episodes play on the first pod", 300, 0.2)
    job("delete", "pod", "tiny-boxes-0", "--grace-period=1", "--wait=false")
    status = job.wait_for("Complete", 300)
    assert (status["attempt"], status["restarts"]["total"], "lastFailure" in status) == (0, 0, False)
    steps = job.metrics(data)
    assert [step["episodes/lost"] for step in steps] == [0, 0]
    assert steps[0]["episodes/retries"] > 0
    assert [step["rewards/game/mean"] for step in steps] == [1, 1]
    _expect_broken(job)
    wait_until(lambda: not job("get", "pods", "-o", "name"), "no pod is left", 60)


def _log(job, pod):
    """Return what a pod has printed; nothing while its container has not begun."""
    try:
        return job("logs", pod)
    except RuntimeError:
        return ""


def _apply_broken(job):
    """Apply the same job as `broken`, with a module that does not exist."""
    whole = job.get()
    broken = {one: whole[one] for one in ("apiVersion", "kind")} | {
        "metadata": {"name": "broken"},
        "spec": whole["spec"] | _environments("gaem:Game"),
    }
    job("apply", "-f", "-", stdin=json.dumps(broken))


def _expect_broken(job):
    """Wait until it has failed; it has had no pod of an attempt."""
    job("wait", "grpojob/broken", "--for=condition=Failed", "--timeout=120s")
    status = json.loads(job("get", "grpojob", "broken", "-o", "json"))["status"]
    failure = status["lastFailure"]
    assert (failure["reason"], failure["role"]) == ("ConfigError", "environment")
    assert "environments[game].factory" in failure["message"]
    assert "No module named 'gaem'" in failure["message"]
    assert not status["members"]
