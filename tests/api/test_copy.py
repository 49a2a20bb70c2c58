"""`grpo cp` and `grpo export` with a real API server: the pod that they create passes PodSecurity `restricted`, is like
those of the job with the claim, and is deleted in any case; what is refused is explained.

Nodes are fake, so the test runs the pod's command itself, and connects to it. Kubelets run it in tests/e2e.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from grpo_cli.cluster.copying import served_claim
from grpo_cli.cluster.copying.copy_pod import PORT, ROOT, SELECTOR
from grpo_cli.cluster.pod_http import NotAllowedError
from support.control_plane.operators import Jobs, bind_claim, make_job
from support.trainer.launchers import free_ports

Grpo = Callable[..., Result]
UNBOUND = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "later"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "no"},
}


@pytest.fixture
def pods(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The pods that were connected to; each runs here, with `tmp_path / "claim"` as the claim."""
    seen: list[dict[str, Any]] = []
    running: list[subprocess.Popen[bytes]] = []
    port, volume = free_ports(1)[0], tmp_path / "claim"
    volume.mkdir()

    def connect(_api: object, _namespace: str, pod: str, asked: int, *, seconds: float) -> http.client.HTTPConnection:
        if pod not in [one["metadata"]["name"] for one in seen]:
            seen.append(jobs.get("pod", pod))
            for process in running:  # the pods before it are deleted
                process.kill()
                process.wait()
            there = {ROOT: str(volume), str(asked): str(port)}
            command = seen[-1]["spec"]["containers"][0]["command"]
            words = [sys.executable, *(there.get(word, word) for word in command[1:])]
            running.append(subprocess.Popen(words, cwd="/"))
        assert asked == PORT
        return http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)

    monkeypatch.setattr(served_claim, "ForwardedConnection", connect)
    monkeypatch.setattr("grpo_cli.cluster.copying.remote_folder.PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(served_claim, "POLL_SECONDS", 0.2)
    yield seen
    for process in running:
        process.kill()
        process.wait()


def _left(jobs: Jobs) -> list[str]:
    """Return the pods of copies that nobody has deleted."""
    return [pod["metadata"]["name"] for pod in jobs.list("pod", SELECTOR) if "deletionTimestamp" not in pod["metadata"]]


def _error(result: Result, code: int) -> str:
    assert result.exit_code == code
    assert "Traceback" not in result.output
    return next(line for line in result.stderr.splitlines() if line.startswith("Error: "))


def test_rows_go_to_the_claim_and_a_model_comes_back(
    grpo: Grpo, jobs: Jobs, pods: list[dict[str, Any]], tmp_path: Path
) -> None:
    jobs("label", "namespace", jobs.namespace, "pod-security.kubernetes.io/enforce=restricted")
    bind_claim(jobs, "runs")
    context = {"runAsUser": 4321, "runAsGroup": 4321, "fsGroup": 4321}
    template = {"securityContext": context, "nodeSelector": {"gpu": "h100"}, "env": [{"name": "TOKEN", "value": "x"}]}
    storage = {"claimName": "runs", "subPath": "grpo", "export": {"everySteps": 5}}
    jobs.apply(make_job("math", storage=storage, podTemplate=template, image="registry.example.com/workload:1"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1"}\n')

    sent = grpo("cp", str(tmp_path / "rows.jsonl"), "runs:/grpo/")

    assert sent.exit_code == 0, sent.output
    assert sent.stderr.splitlines()[-1] == f"1 file, 20 bytes: {tmp_path}/rows.jsonl is at runs:grpo/rows.jsonl"
    assert (tmp_path / "claim/grpo/rows.jsonl").read_text() == '{"prompt": "1 + 1"}\n'
    (pod,) = pods
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "registry.example.com/workload:1"
    assert pod["spec"]["securityContext"].items() >= context.items()
    assert "nodeSelector" not in pod["spec"]
    assert "env" not in container
    again = grpo("cp", str(tmp_path / "rows.jsonl"), "runs:grpo")
    assert "20 of 20 bytes were there already" in again.stderr

    early = grpo("export", "math", str(tmp_path / "model"))
    assert "job math has exported no model" in _error(early, 4)
    run = f"{jobs.namespace}/math/uid"
    jobs.wait_for("math", "Accepted", "True")
    status = {"status": {"export": {"path": f"{run}/exports/step-5", "bytes": 3}}}
    jobs("patch", "grpo", "math", "--subresource=status", "--type=merge", "-p", json.dumps(status))
    model = tmp_path / "claim/grpo" / run / "exports/step-5"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}\n")
    fetched = grpo("export", "math", str(tmp_path / "model"))
    assert fetched.exit_code == 0, fetched.output
    assert (tmp_path / "model/config.json").read_text() == "{}\n"

    missing = grpo("cp", "runs:grpo/row.jsonl", str(tmp_path / "new"))
    assert f"there is no runs:grpo/row.jsonl; grpo has rows.jsonl, {jobs.namespace}" in _error(missing, 4)
    assert _left(jobs) == []


def test_what_is_refused_says_why_before_or_with_the_pod(
    grpo: Grpo, jobs: Jobs, pods: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind_claim(jobs, "runs")
    (tmp_path / "rows").write_text("1")
    nothing = grpo("cp", str(tmp_path / "row"), "runs:")
    assert "there is no" in _error(nothing, 4)
    other = grpo("cp", str(tmp_path / "rows"), "run:")
    assert "there is runs" in _error(other, 4)

    def refuse(*_: object, **__: object) -> http.client.HTTPConnection:
        raise NotAllowedError("you may not forward ports")

    with monkeypatch.context() as changed:
        changed.setattr(served_claim, "ForwardedConnection", refuse)
        barred = grpo("cp", str(tmp_path / "rows"), "runs:")
    assert _error(barred, 3) == "Error: you may not forward ports"

    (tmp_path / "claim").rmdir()
    (tmp_path / "claim").write_text("no folder")
    unfit = grpo("cp", str(tmp_path / "rows"), "runs:new/")
    assert "claim runs: " in _error(unfit, 1)

    jobs.apply(UNBOUND)
    monkeypatch.setattr(served_claim, "START_SECONDS", 2)
    late = grpo("cp", str(tmp_path / "rows"), "later:")
    assert "unbound" in _error(late, 124)

    jobs("create", "quota", "none", "--hard=pods=0")
    jobs("wait", "resourcequota/none", "--for=jsonpath={.status.hard.pods}=0", "--timeout=30s")
    refused = grpo("cp", str(tmp_path / "rows"), "runs:")
    assert "exceeded quota: none" in _error(refused, 2)
    assert _left(jobs) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_pod_is_deleted_when_the_command_is_interrupted(
    jobs: Jobs, kubeconfig: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    jobs.apply(UNBOUND)
    (tmp_path / "rows").write_text("1")
    command = [sys.executable, "-m", "grpo_cli", "cp", str(tmp_path / "rows"), "later:", "-n", jobs.namespace]
    environ = os.environ | {"KUBECONFIG": str(kubeconfig)}
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "pod grpo-cp-" in process.stderr.readline()
    assert len(_left(jobs)) == 1
    process.send_signal(number)
    assert process.wait(60) == code
    assert _left(jobs) == []
