"""Downloads into the cache from a hub that breaks off: the real client of the hub, next to a small hub on loopback."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from grpo_cli.local.processes import free_ports
from grpo_devcluster.progress import wait_until
from support.trainer.hub import Hub
from support.trainer.places import contract_json

COMMIT = "1" * 40
FILES = {
    "config.json": b"{}",
    "model-1.safetensors": b"a" * 300_000,
    "model-2.safetensors": b"b" * 500_000,
    "pytorch_model.bin": b"c" * 900_000,
}


@pytest.fixture
def hub():
    with Hub("some/model", {COMMIT: FILES}).serving() as server:
        yield server


def _start(hub, cache, port, **wanted):
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "GRPO_TERMINATION_LOG": str(cache / "termination-log"),
    }
    command = [sys.executable, "-m", "grpo_workload.download_pod", json.dumps({"statusPort": port, **wanted})]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _phase(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=5) as answer:
            return str(json.load(answer)["phase"])
    except OSError:
        return ""


def test_a_download_that_is_killed_goes_on_with_the_files_that_it_lacks(hub, tmp_path):
    (port,) = free_ports(1)
    hub.halted = "model-2.safetensors"
    first = _start(hub, tmp_path, port, model="some/model")
    wait_until(lambda: _phase(port).startswith("downloads some/model"), "it says how far it is", 60)
    wait_until(lambda: {"model-1.safetensors", "model-2.safetensors"} <= {*hub.sent}, "both are asked for", 60)
    blobs = tmp_path / "hub" / "models--some--model" / "blobs"
    for name in ("config.json", "model-1.safetensors"):  # several are downloaded at once
        wait_until((blobs / f"{name}-{COMMIT}").exists, f"{name} is whole", 60)
    first.kill()
    first.wait()
    hub.halted = ""
    hub.sent.clear()
    again = _start(hub, tmp_path, port, model="some/model")
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert hub.sent == ["model-2.safetensors"], "neither what is whole nor weights of another form"
    folder = tmp_path / "hub" / "models--some--model" / "snapshots" / COMMIT
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: content for name, content in FILES.items() if name != "pytorch_model.bin"
    }


def test_a_model_that_the_hub_does_not_have_names_the_field(hub, tmp_path):
    process = _start(hub, tmp_path, free_ports(1)[0], model="no/model")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 64, said
    assert "model.name: cannot load no/model" in said
    assert (tmp_path / "termination-log").read_text().startswith("model.name: cannot load no/model")


def test_a_hub_that_does_not_answer_is_tried_again_and_told_in_one_line(hub, tmp_path):
    hub.server_close()
    process = _start(hub, tmp_path, free_ports(1)[0], model="some/model")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert (tmp_path / "termination-log").read_text() == "ConnectError: [Errno 111] Connection refused"


def test_what_cannot_fit_is_refused_before_its_weights_are_downloaded(hub, tmp_path, monkeypatch):
    config = Path(__file__).parents[1] / "capacity/configs/qwen2.5-7b/config.json"
    monkeypatch.setitem(FILES, "config.json", config.read_bytes())
    job = contract_json({"model": {"name": "some/model"}, "parallelism": {"zeroStage": 0}}, gpus=2)
    process = _start(hub, tmp_path, free_ports(1)[0], model="some/model", contract=job, gpuBytes=80 * 2**30)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 64, said
    refusal = (tmp_path / "termination-log").read_text()
    assert "rank 0 (job-a-0) needs" in refusal
    assert "One of these would fit: parallelism.optimizerDtype: " in refusal
    assert set(hub.sent) == {"config.json"}
