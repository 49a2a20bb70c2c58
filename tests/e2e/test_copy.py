"""Files on real kubelets: rows go to a claim, a job trains on them, and its exported model comes back; a copy that was
interrupted goes on where it was, and leaves no pod.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from grpo_cli.cluster.copying.copy_pod import SELECTOR
from grpo_cli.python import Job
from grpo_devcluster import storage
from grpo_devcluster.progress import wait_until
from support.cluster.jobs_on_cluster import JobOnCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: runs}
spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}
"""


def _start(job: JobOnCluster, *args: str) -> subprocess.Popen[str]:
    at = ["--kubeconfig", str(job.kubeconfig), "--namespace", job.namespace]
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_cli", *args, *at], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _grpo(job: JobOnCluster, *args: str) -> str:
    process = _start(job, *args)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def test_rows_go_in_and_a_model_comes_out(job: JobOnCluster, tmp_path: Path) -> None:
    job("apply", "-f", "-", stdin=CLAIM)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(16)))
    _grpo(job, "cp", str(rows), "runs:sets/")
    big = tmp_path / "big.bin"
    big.write_bytes(os.urandom(200 << 20))
    data = storage.claim_path(job.kubeconfig, job.namespace, "runs")
    assert (data / "sets/rows.jsonl").read_bytes() == rows.read_bytes()
    assert (data / "sets/rows.jsonl").stat().st_uid == 65532

    part = data / ".big.bin.grpo-cp"
    process = _start(job, "cp", str(big), "runs:")
    wait_until(lambda: part.exists() and part.stat().st_size > 16 << 20, "a part of the file", 120, interval=0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    left = json.loads(job("get", "pods", "-l", SELECTOR, "-o", "json"))["items"]
    assert [pod for pod in left if "deletionTimestamp" not in pod["metadata"]] == []
    assert not (data / "big.bin").exists()
    assert "bytes were there already" in _grpo(job, "cp", str(big), "runs:")
    assert (data / "big.bin").read_bytes() == big.read_bytes()
    assert not part.exists()

    job.apply(
        dataset={"path": "/data/sets/rows.jsonl"},
        generation={"topology": "Colocate", "engine": "Transformers"},
        trainer={"groups": [{"name": "a", "gpus": 1}]},
        storage={"claimName": "runs", "export": {"everySteps": 2}},
    )
    export = job.wait_for("Complete", 600)["export"]
    files = {path.name: path.read_bytes() for path in (data / export["path"]).iterdir()}
    assert export["bytes"] == sum(map(len, files.values()))
    _grpo(job, "export", "tiny", str(tmp_path / "model"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == files
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    # A finished job's page, after its pods are gone: curves and completions come from the claim, the rest from the job.
    wait_until(lambda: job("get", "pods", "-l", "training.grpo.dev/job=tiny", "-o", "name") == "", "no pods", 120)
    process = _start(job, "ui", "tiny", "--no-browser")
    assert process.stdout is not None
    address = next(found[0] for line in process.stdout if (found := re.search(r"http://[^/\s]+", line)))
    with urllib.request.urlopen(f"{address}/api/state?generation=0&after=-1", timeout=60) as answer:
        shown = json.load(answer)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert [row["step"] for row in shown["metrics"]] == [0, 1]
    assert shown["completions"]
    assert (shown["job"]["phase"], shown["note"]) == ("Succeeded", "")
    there = Job.from_cluster("tiny", kubeconfig=str(job.kubeconfig), namespace=job.namespace)
    assert list(there.metrics()["step"]) == [0, 1]
    assert (there.export(tmp_path / "again") / "config.json").read_bytes() == files["config.json"]
