"""docs/tutorial.md on real kubelets, as its reader types it: rows go to a claim, a job trains on them, and its exported
model comes back. A copy that was interrupted goes on where it was, and leaves no pod. A notebook submits the same job.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from grpo_cli.cluster.copying.copy_pod import SELECTOR
from grpo_cli.python import Job
from grpo_devcluster import storage
from grpo_devcluster.progress import wait_until
from support.cluster.tutorial import Tutorial
from support.notebook import run_notebook
from support.paths import ROOT
from support.trainer.tiny_model import make_tiny_model

pytestmark = pytest.mark.timeout(900)

COMMANDS = {"--gpu l4": f"--gpu l4 --model {ROOT / 'tests/unit/workload/capacity/configs/qwen2.5-0.5b'}"}
"""Options that commands of the page get here: the model's configuration, as there is no hub."""

JOB = {
    "  model: {name: Qwen/Qwen2.5-0.5B-Instruct}\n": "  model: {path: /data/tiny, dtype: float32}\n"
    "  device: {type: cpu, resourceName: nvidia.com/gpu}\n",
    "promptsPerStep: 16, numGenerations: 8": "promptsPerStep: 3, numGenerations: 4",
    "generation: {topology: Colocate,": "generation: {topology: Colocate, engine: Transformers,",
}
"""Changes of the page's job: a tiny model, few completions and no GPU."""


def _start(job, *args):
    at = ["--kubeconfig", str(job.kubeconfig), "--namespace", job.namespace]
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_cli", *args, *at], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _grpo(job, *args):
    process = _start(job, *args)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def test_the_tutorial_does_what_it_says(job, tmp_path, capsys):
    page = Tutorial(job, tmp_path, COMMANDS)
    page.through("grpo cp")
    data = storage.claim_path(job.kubeconfig, job.namespace, "sums")
    assert (data / "sets/train.jsonl").read_bytes() == (tmp_path / "train.jsonl").read_bytes()
    assert (data / "sets/train.jsonl").stat().st_uid == 65532
    _interrupted_copy_goes_on(job, tmp_path, data)

    page.through("grpo plan")
    make_tiny_model(data / "tiny")
    page.change("job.yaml", JOB)
    page.through("grpo submit")
    page.through("grpo status")
    job("wait", "pod", "-l", "training.grpo.dev/job=sums", "--for=delete", "--timeout=120s")
    _page_of_a_finished_job(page.start("grpo ui sums", "--no-browser"))
    page.through("grpo export")
    export = json.loads(job("get", "grpojob", "sums", "-o", "json"))["status"]["export"]
    files = {path.name: path.read_bytes() for path in (data / export["path"]).iterdir()}
    assert export["bytes"] == sum(map(len, files.values()))
    fetched = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert fetched.keys() == files.keys()
    assert {name for name in files if fetched[name] != files[name]} <= {"README.md", "manifest.json"}
    assert b"the job had held GPUs for" in fetched["README.md"]
    page.through("python ask.py")
    assert page.has_ended()

    there = Job.from_cluster("sums", kubeconfig=str(job.kubeconfig), namespace=job.namespace)
    assert list(there.metrics()["step"]) == list(range(50))
    assert len(there.completions()) > 0
    assert capsys.readouterr().err.count("by a short-lived pod") == 1, "the files of an ended job are fetched once"
    assert (there.export(tmp_path / "again") / "config.json").read_bytes() == files["config.json"]

    page.change(
        "job.yaml",
        {"GRPOJob\nmetadata: {name: sums}": "GRPOJob\nmetadata: {name: notebook}", "maxSteps: 50": "maxSteps: 4"},
    )
    (folder := tmp_path / "notebook").mkdir()
    env = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    said = run_notebook("cluster.ipynb", folder, {"../quickstart.yaml": "../job.yaml"}, **env)
    assert f"job {job.namespace}/notebook created" in said
    assert "step 3 reward" in said
    assert (folder / "model/config.json").exists()


def _interrupted_copy_goes_on(job, tmp_path, data):
    big = tmp_path / "big.bin"
    big.write_bytes(os.urandom(200 << 20))
    part = data / ".big.bin.grpo-cp"
    process = _start(job, "cp", str(big), "sums:")
    wait_until(lambda: part.exists() and part.stat().st_size > 16 << 20, "a part of the file", 120, interval=0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    left = json.loads(job("get", "pods", "-l", SELECTOR, "-o", "json"))["items"]
    assert [pod for pod in left if "deletionTimestamp" not in pod["metadata"]] == []
    assert not (data / "big.bin").exists()
    assert "bytes were there already" in _grpo(job, "cp", str(big), "sums:")
    assert (data / "big.bin").read_bytes() == big.read_bytes()
    assert not part.exists()


def _page_of_a_finished_job(process):
    """After its pods are gone: curves and completions come from the claim, the rest from the job."""
    address = next(found[0] for line in process.stdout if (found := re.search(r"http://[^/\s]+", line)))
    with urllib.request.urlopen(f"{address}/api/state?generation=0&after=-1", timeout=60) as answer:
        shown = json.load(answer)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert [row["step"] for row in shown["metrics"]] == list(range(50))
    assert shown["completions"]
    assert (shown["job"]["phase"], shown["note"]) == ("Succeeded", "")
