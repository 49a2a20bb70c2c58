"""A job on the cluster that survives faults: a rank in each of two pods, slow steps, and the time of each recovery."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_devcluster.progress import wait_until
from grpo_workload.storage.journal import read_lineage
from support.cluster.jobs_on_cluster import SELECTOR, JobOnCluster
from support.cluster.surface import SECRET

TRAINING = {"promptsPerStep": 2, "numGenerations": 4, "maxSteps": 120, "maxCompletionLength": 8, "learningRate": 1e-3}
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
REWARDS = [{"name": "even", "function": "chaos:score"}]
_KILL = (
    "import os, signal, pathlib; [os.kill(int(p.name), signal.SIGKILL) for p in pathlib.Path('/proc').iterdir()"
    " if p.name.isdigit() and b'{what}' in (p / 'cmdline').read_bytes() and int(p.name) != os.getpid()]"
)


class Survivor:
    """A job that is hit again and again."""

    def __init__(self, job: JobOnCluster) -> None:
        self.job = job
        self.recoveries: list[tuple[str, float]] = []  # a fault is there again where its test is tried again

    def apply(self, **spec: Any) -> None:
        """Apply the job, with fields of `spec` in place of the defaults, and wait until it is Running."""
        env = [{"name": "PYTHONPATH", "value": "/data"}, {"name": "CHAOS_TOKEN", "value": SECRET}]
        limits = {"resources": {"limits": {"memory": "3Gi"}}, "terminationGracePeriodSeconds": 30}
        defaults = {
            "training": TRAINING,
            "generation": {"topology": "Colocate", "engine": "Transformers"},
            "rewards": REWARDS,
            "trainer": {"groups": [{"name": "a", "gpus": 1}, {"name": "b", "gpus": 1}]},
            "storage": {"claimName": "runs", "checkpointEverySteps": 5},
            "podTemplate": {"env": env} | limits,
            "failurePolicy": {"backoffSeconds": 0, "maxRestarts": 20},
        }
        self.data = self.job.apply(files={"chaos.py": REWARD, "slow": ""}, **defaults | spec)
        self.job.wait_for("Running", 600)

    def status(self) -> dict[str, Any]:
        return dict(self.job.get().get("status", {}))

    def folder(self) -> Path:
        """Return the run's folder behind the claim."""
        return self.data / self.job.namespace / "tiny" / self.job.get()["metadata"]["uid"]

    def steps(self, above: int, timeout: float = 360) -> None:
        """Wait until the attempt that runs reports a step above `above`."""

        def moved() -> bool:
            status = self.status()
            assert status["phase"] not in ("Failed", "Succeeded"), json.dumps(status, indent=1)
            progress = status.get("progress", {"step": 0, "time": ""})
            return int(progress["step"]) > above and progress["time"] > status["attemptStartTime"]

        wait_until(moved, f"a step above {above}", timeout, interval=0.5)

    def kill(self, pod: str, what: str) -> None:
        """SIGKILL a pod's processes with `what` in their command line; `kubectl exec` runs as the pod's user."""
        self.job("exec", pod, "--", "python", "-c", _KILL.format(what=what))

    @contextmanager
    def recovers(self, fault: str, reason: str | None) -> Iterator[None]:
        """The block ends the attempt. The next attempt trains on, and `lastFailure` has `reason` (None: any)."""
        before = self.status()
        began = time.monotonic()
        yield
        wait_until(lambda: self.status()["attempt"] > before["attempt"], f"next attempt after: {fault}", 240, 0.2)
        wait_until(lambda: self.status()["phase"] == "Running", f"running after: {fault}", 360, interval=0.5)
        self.recoveries.append((fault, time.monotonic() - began))
        status = self.status()
        assert status["attempt"] == before["attempt"] + 1, json.dumps(status, indent=1)
        assert status["restarts"]["total"] == before["restarts"]["total"] + 1
        assert reason in (None, status["lastFailure"]["reason"]), json.dumps(status["lastFailure"], indent=1)
        self.steps(status.get("progress", {}).get("checkpointStep", 0))

    def completes(self) -> None:
        """Let the steps be fast and wait for the end: every step was made once and in order, and no pod is left."""
        job = self.job
        (self.data / "slow").unlink(missing_ok=True)
        status = job.wait_for("Complete", 600)
        steps = list(range(job.get()["spec"]["training"]["maxSteps"]))
        assert status["progress"]["step"] == len(steps)
        assert [line["step"] for line in job.metrics(self.data)] == steps
        assert [groups[0].step for groups in read_lineage(self.folder())] == steps
        wait_until(lambda: not any(job.replicas()), "StatefulSets at 0", 60)
        wait_until(lambda: not job("get", "pods", "-o", "name"), "no pod is left", 180)
        assert len(job("get", "configmap", "-l", SELECTOR, "-o", "name").split()) == 1

    def report(self) -> None:
        """Print the seconds of each recovery."""
        seconds = [(fault, round(seconds, 1)) for fault, seconds in self.recoveries]
        print("recovered in seconds:", json.dumps(seconds))  # noqa: T201
