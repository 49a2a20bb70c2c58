"""`grpo ui` of a job that runs again, in a new attempt or as a new job of the same name: nothing of before stays."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from grpo_cli.cluster.job_reader import JobReader
from grpo_cli.cluster.kube import Kube
from grpo_cli.cluster.pod_http import PodError
from grpo_cli.documents.manifest import load_job
from grpo_cli.ui.cluster import ClusterSource
from grpo_cli.ui.finished import is_away
from grpo_spec.reports import Progress
from support.paths import EXAMPLES, RUN_FOLDER

MASTER = "one-node-node-0"
REWARDS = {"first": 0.0, "second": 1.0}


class Cluster:
    """A job, its pods, and what the launcher of rank 0 answers, as a test sets them."""

    def __init__(self) -> None:
        self.pods: list[Any] = []
        self.steps: list[int] = []
        self.attempt = 0
        self.uid = "first"
        self.ended = False
        self.told = 0  # steps that the operator has written

    @property
    def job(self) -> dict[str, Any]:
        """The job as the API server has it."""
        document = load_job(EXAMPLES / "one-node-4+1.yaml").document
        began = "2026-01-01T00:00:00Z"
        document["metadata"] |= {"namespace": "default", "uid": self.uid, "creationTimestamp": began}
        complete = {"type": "Complete", "status": "True", "reason": "Succeeded", "message": "all ranks have ended"}
        complete |= {"lastTransitionTime": began, "observedGeneration": 1}
        status = {"phase": "Running", "attempt": self.attempt, "runningTime": began}
        status |= {"progress": {"step": self.told, "totalSteps": 9, "time": began}} if self.told else {}
        return document | {"status": status | {"conditions": [complete] if self.ended else []}}

    def run(self, steps: int) -> None:
        """Let the pod of rank 0 run, which has taken so many steps."""
        metadata = {"name": MASTER, "namespace": "default", "uid": f"{self.uid}-{self.attempt}"}
        self.pods, self.steps = [{"metadata": metadata, "spec": {}, "status": {"phase": "Running"}}], list(range(steps))

    def answer(self, _api: object, _namespace: str, _pod: str, _port: int, path: str) -> Any:
        """Answer as the launcher of rank 0, which exits when the job has ended."""
        if self.ended:
            raise PodError(f"pod {MASTER} does not answer")
        if path == "/identity":
            return {"pod": MASTER, "podUid": self.pods[0]["metadata"]["uid"], "localPort": 2}
        if path == "/progress":
            return Progress(step=len(self.steps), total_steps=9).model_dump(by_alias=True, mode="json")
        after = int(path.rpartition("after=")[2])
        rows = [{"step": step, "reward": REWARDS[self.uid], "step_time": 1.0} for step in self.steps if step > after]
        return {"attempt": self.attempt, "metrics": rows}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(Kube, "job", lambda *_: found.job)
    monkeypatch.setattr(Kube, "pods", lambda *_: found.pods)
    monkeypatch.setattr(Kube, "listed", lambda *_: [])
    monkeypatch.setattr("grpo_cli.cluster.launchers.get_json", found.answer)
    return found


def _kube() -> Kube:
    return Kube(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")), "default")


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(RUN_FOLDER, tmp_path / "run"))
    (folder / "logs").mkdir()
    (folder / "logs" / f"{MASTER}.log").write_text("boom\n")
    return folder


def test_a_new_attempt_replaces_the_files_of_the_job_that_had_ended(cluster: Cluster, fetched: Path) -> None:
    source = ClusterSource(_kube(), "one-node", fetched)
    source.refresh()
    assert (source.shown.history.last_step, source.shown.logs) == (7, {MASTER: "boom\n"})
    before = source.shown.history.generation
    cluster.attempt = 1
    cluster.run(9)
    source.refresh()
    assert source.shown.logs == {}
    sent = source.shown.history.since(before, 7)
    assert [row["step"] for row in sent["metrics"]] == list(range(9)), "a browser gets all of them"


def test_files_of_a_job_that_was_deleted_are_not_those_of_the_next_one(cluster: Cluster, fetched: Path) -> None:
    source = ClusterSource(_kube(), "one-node", fetched)
    source.refresh()
    cluster.uid = "second"
    source.refresh()
    assert (source.shown.logs, source.shown.history.metrics, source.shown.changed) == ({}, [], None)
    assert source.shown.history.since(0, 7)["after"] == -1, "a browser forgets its rows"


def test_steps_of_a_job_that_was_deleted_are_not_those_of_the_next_one(cluster: Cluster) -> None:
    reader, source = JobReader(_kube(), "one-node"), ClusterSource(_kube(), "one-node")
    cluster.run(3)
    reader.read()
    source.refresh()
    cluster.uid = "second"
    cluster.run(5)
    *_, view = reader.read()
    source.refresh()
    assert view.training is not None
    assert view.training.curves["reward"] == [1.0] * 5
    assert [row["reward"] for row in source.shown.history.metrics] == [1.0] * 5


def test_files_of_a_job_that_has_just_ended_come_from_its_claim_though_its_pod_is_still_called_running(
    cluster: Cluster, fetched: Path
) -> None:
    cluster.run(3)
    assert not is_away(_kube(), cluster.job)
    cluster.ended = True
    assert is_away(_kube(), cluster.job)
    source = ClusterSource(_kube(), "one-node", fetched)
    source.refresh()
    assert (source.shown.history.last_step, source.shown.logs, source.shown.note) == (7, {MASTER: "boom\n"}, "")


def test_steps_that_a_launcher_told_of_stay_when_it_is_gone_but_not_for_the_next_job(cluster: Cluster) -> None:
    reader, cluster.told = JobReader(_kube(), "one-node"), 2
    cluster.run(5)
    shown = [reader.read()[2].training.step]
    cluster.pods = []
    shown.append(reader.read()[2].training.step)
    cluster.uid = "second"
    shown.append(reader.read()[2].training.step)
    assert shown == [5, 5, 2]
