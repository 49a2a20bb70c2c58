"""`grpo cp` between two folders, one of them served as in the pod: what is copied, resumed, compared and refused; the
pod that it creates; and what `grpo export` says of jobs without a model.
"""

import errno
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from grpo_cli.cluster.copying import copy_pod, folder, remote_folder, transfer
from grpo_cli.cluster.copying.folder import Folder
from grpo_cli.cluster.copying.remote_folder import ClaimError, RemoteFolder
from grpo_cli.cluster.copying.served_claim import _check
from grpo_cli.cluster.copying.transfer import NotCopiedError, copy, place
from grpo_cli.cluster.kube import Kube
from grpo_cli.cluster.pod_http import PodError
from grpo_cli.commands.copy import Place, add_bill, ends, exported
from grpo_cli.errors import CliError, Exit
from grpo_operator.api.names import DEFAULTS_KINDS
from grpo_operator.layout.pods import SECURITY
from grpo_workload.storage.manifest import faults, read_manifest, seal, write_manifest

CONTENT = os.urandom(10_000)


def _port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _start(root: Path, port: int, idle: float = 30) -> subprocess.Popen[str]:
    """Start the program as the pod does, with nothing of ours to import."""
    program = Path(folder.__file__).read_text()
    return subprocess.Popen([sys.executable, "-I", "-c", program, str(root), str(port), str(idle)], text=True, cwd="/")


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    """The claim's folder, with a file in it."""
    (tmp_path / "claim" / "runs").mkdir(parents=True)
    (tmp_path / "claim" / "runs" / "metrics.jsonl").write_text("{}\n")
    return tmp_path / "claim"


@pytest.fixture
def served(claim: Path) -> Iterator[RemoteFolder]:
    """That folder through the program."""
    port = _port()
    process = _start(claim, port)
    served = RemoteFolder(lambda: http.client.HTTPConnection("127.0.0.1", port), lambda: None)
    yield served
    served.close()
    process.terminate()
    assert process.wait(10) == 0


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 1000)
    monkeypatch.setattr(remote_folder, "PAUSE_SECONDS", 0.02)


class Counter:
    """Bytes that were copied, and bytes that were there."""

    def __init__(self) -> None:
        self.copied, self.there = 0, 0

    def __call__(self, number: int, is_there: bool) -> None:
        self.there, self.copied = self.there + number * is_there, self.copied + number * (not is_there)


def _copy(one: transfer.Side, path: str, other: transfer.Side, to: str) -> tuple[int, int]:
    counter = Counter()
    copy(one, path, other, to, counter, one.look(path))
    return counter.copied, counter.there


def test_a_folder_goes_to_the_claim_and_back_and_what_is_there_is_not_copied_again(
    served: RemoteFolder, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    (data / "deep" / "er").mkdir(parents=True)
    (data / "deep" / "er" / "rows é & ?=#.parquet").write_bytes(CONTENT)
    (data / "empty").write_bytes(b"")
    (data / "link").symlink_to(data / "deep")
    (data / "deep" / "above").symlink_to(data)  # a circle is walked once
    here, total = Folder(str(tmp_path)), 20_000
    assert _copy(here, "data", served, "sets/one") == (total, 0)
    assert _copy(here, "data", served, "sets/one") == (0, total)
    (data / "deep" / "er" / "rows é & ?=#.parquet").write_bytes(CONTENT[:-1] + b"x")
    assert _copy(here, "data", served, "sets/one")[0] > 0, "of the same size, and another content"
    assert _copy(served, "sets/one", here, "back") == (total, 0)
    assert (tmp_path / "back/link/er/rows é & ?=#.parquet").read_bytes() == CONTENT[:-1] + b"x"
    assert (tmp_path / "back/empty").read_bytes() == b""
    assert not [*tmp_path.rglob(f"*{folder.PART}")]


@pytest.mark.parametrize("upload", [True, False])
def test_an_interrupted_copy_goes_on_where_it_was_and_keeps_no_part_that_differs(
    served: RemoteFolder, claim: Path, tmp_path: Path, upload: bool
) -> None:
    here = Folder(str(tmp_path))
    sides = [(tmp_path, here), (claim, served)]
    (source, one), (target, other) = sides if upload else sides[::-1]
    (source / "model.bin").write_bytes(CONTENT)
    (target / ".copy.bin.grpo-cp").write_bytes(CONTENT[:2000] + b"?" * 1000 + CONTENT[3000:5500])
    assert not (target / "copy.bin").exists()
    assert _copy(one, "model.bin", other, "copy.bin") == (6000, 4000)
    assert (target / "copy.bin").read_bytes() == CONTENT
    assert not (target / ".copy.bin.grpo-cp").exists()


def test_a_broken_connection_is_made_again_and_a_pod_that_is_gone_is_named(claim: Path, tmp_path: Path) -> None:
    port, broken = _port(), 0
    process = _start(claim, port)

    def connect() -> http.client.HTTPConnection:
        nonlocal broken
        broken += 1
        if broken == 2:
            raise PodError("no connection")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        if broken == 3:  # the answer of what was asked is lost
            connection.sock = socket.create_connection(("127.0.0.1", port))
            connection.sock.shutdown(socket.SHUT_RD)
        return connection

    gone = False

    def check() -> None:
        if gone:
            raise CliError("pod grpo-cp-x ended", Exit.UNREACHABLE)

    served = RemoteFolder(connect, check)
    (tmp_path / "rows").write_bytes(CONTENT)
    assert _copy(Folder(str(tmp_path)), "rows", served, "new/rows") == (10_000, 0)
    assert broken > 3
    assert (claim / "new/rows").read_bytes() == CONTENT
    process.terminate()
    process.wait(10)
    served.close()
    gone = True
    with pytest.raises(CliError, match="grpo-cp-x ended"):
        served.look("")


def test_an_api_server_that_is_away_ends_no_copy() -> None:
    away = Kube(client.ApiClient(client.Configuration(host="http://127.0.0.1:1", retries=False)), "team")
    _check(away, "grpo-cp-x")


def test_the_program_ends_when_nobody_asks(claim: Path) -> None:
    process = _start(claim, _port(), idle=0.5)
    assert process.wait(10) == 0


def test_errors_of_the_claim_are_the_same_errors_here(served: RemoteFolder, claim: Path) -> None:
    with pytest.raises(ClaimError) as refused:
        served.write("runs/metrics.jsonl/x", 0, b"1")
    assert refused.value.errno in (errno.ENOTDIR, errno.EEXIST)
    with pytest.raises(ClaimError, match="leaves the folder"):
        served.look("../outside")
    assert served.look("run") == {"kind": "none", "files": {}, "parts": {}, "near": [".", ["runs"]]}


def test_a_full_volume_says_how_much_is_free(tmp_path: Path) -> None:
    port = _port()
    (tmp_path / "rows").symlink_to("/dev/full")
    (tmp_path / ".rows.grpo-cp").symlink_to("/dev/full")
    process = _start(tmp_path, port)
    served = RemoteFolder(lambda: http.client.HTTPConnection("127.0.0.1", port), lambda: None)
    with pytest.raises(ClaimError, match=r"No space left on device; [\d,]+ bytes are free"):
        served.write("rows", 0, b"1")
    process.kill()
    process.wait()


def test_a_file_that_two_copies_write_gets_no_hole(served: RemoteFolder, claim: Path) -> None:
    other = CONTENT[::-1]
    for at, part in ((0, CONTENT[:5000]), (0, other[:5000]), (5000, other[5000:])):
        served.write("big", at, part)
    served.publish("big", len(other))
    with pytest.raises(ClaimError, match="another copy writes the same file"):
        served.write("big", 5000, CONTENT[5000:])
    assert (claim / "big").read_bytes() == other


def test_links_to_nothing_and_what_is_beside_a_file_stop_no_copy(served: RemoteFolder, claim: Path) -> None:
    (claim / "gone").symlink_to(claim / "nowhere")
    assert [served.kind(path) for path in ("", "runs/metrics.jsonl", "gone")] == ["folder", "file", "none"]
    assert list(served.look("")["files"]) == ["runs/metrics.jsonl"]


def test_a_file_that_changes_below_a_copy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(CONTENT)
    here = Folder(str(tmp_path))
    found = here.look("rows")
    (tmp_path / "rows").write_bytes(CONTENT[:5500])
    with pytest.raises(NotCopiedError, match="rows became shorter"):
        copy(here, "rows", here, "other", lambda *_: None, found)


def test_a_file_goes_into_a_folder_and_of_a_folder_the_content_does() -> None:
    for kind, there, target, goes_to in (
        ("file", "none", "new.jsonl", "new.jsonl"),
        ("file", "none", "new/", "new/rows.jsonl"),
        ("file", "folder", "sets", "sets/rows.jsonl"),
        ("file", "folder", "", "rows.jsonl"),
        ("file", "file", "sets", "sets"),
        ("folder", "none", "new", "new"),
        ("folder", "folder", "sets", "sets"),
    ):
        assert place({"kind": kind}, "home/rows.jsonl", there, target) == goes_to


def test_one_end_is_a_claim() -> None:
    assert ends("rows.jsonl", "team-data:/sets/") == (Place(None, "rows.jsonl"), Place("team-data", "sets/"))
    assert ends("runs:", "./a:b") == (Place("runs", ""), Place(None, "./a:b"))
    for wrong in [("a", "b"), ("one:a", "two:b")]:
        with pytest.raises(CliError, match="must be CLAIM:PATH"):
            ends(*wrong)


def _claim(*modes: str) -> dict[str, Any]:
    return {"metadata": {"name": "runs"}, "spec": {"accessModes": [*modes]}}


def _pod(name: str, claim: str, node: str | None, phase: str = "Running") -> dict[str, Any]:
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]
    spec = {"nodeName": node, "volumes": volumes, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}


def test_a_claim_that_is_on_one_node_is_served_there() -> None:
    pods = [_pod("ended", "runs", "a", "Succeeded"), _pod("waits", "runs", None), _pod("other", "sets", "b")]
    assert copy_pod.holder_of(_claim("ReadWriteOnce"), pods) is None
    holds = _pod("trains", "runs", "c")
    assert copy_pod.holder_of(_claim("ReadWriteMany"), [*pods, holds]) is None
    assert copy_pod.holder_of(_claim("ReadWriteOnce"), [*pods, holds]) == holds
    spec = copy_pod.copy_pod("runs", None, None, holds)["spec"]
    assert '"metadata.name", "operator": "In", "values": ["c"]' in json.dumps(spec["affinity"])
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]


def _job(name: str, age: int, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "uid": name, "creationTimestamp": f"2026-01-0{9 - age}T00:00:00Z"}
    return {"metadata": metadata, "spec": spec}


def test_the_pod_is_like_those_of_the_newest_job_with_the_claim() -> None:
    jobs = [_job("new", 1), _job("old", 5, storage={"claimName": "runs"}), _job("mid", 3, cache={"claimName": "runs"})]
    assert [copy_pod.job_of(claim, jobs) for claim in ("runs", "other")] == [jobs[2], jobs[0]]
    assert copy_pod.job_of("runs", []) is None


def test_without_a_job_the_pod_has_the_user_of_jobs_and_the_image_of_the_release() -> None:
    pod = copy_pod.copy_pod("runs", None, None, None)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["securityContext"] == SECURITY
    assert container["image"].startswith("ghcr.io/")
    assert copy_pod.copy_pod("runs", None, "mine:1", None)["spec"]["containers"][0]["image"] == "mine:1"
    assert 0 < spec["activeDeadlineSeconds"] < 86_400
    like = ({"securityContext": {"runAsUser": 7}, "imagePullSecrets": [{"name": "s"}], "nodeSelector": {"a": "b"}},)
    made = copy_pod.copy_pod("runs", (*like, {"image": "job:1", "imagePullPolicy": "Always"}), None, None)["spec"]
    assert (made["securityContext"], made["imagePullSecrets"]) == ({"runAsUser": 7}, [{"name": "s"}])
    assert (made["containers"][0]["image"], made["containers"][0]["imagePullPolicy"]) == ("job:1", "Always")
    assert "nodeSelector" not in made, "the pod needs no GPU"


def test_the_card_of_a_fetched_model_has_the_bill_and_its_manifest_is_right(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# math, after 9 steps\n")
    write_manifest(tmp_path, {"README.md": seal(tmp_path / "README.md")})
    priced = {DEFAULTS_KINDS[0]: {"generation": 1, "defaults": {"gpuHourPrice": "2.5 EUR"}}}
    usage = {"gpuSeconds": {"held": 7200, "training": 7200}, "time": "2026-01-01T00:00:00Z"}
    for site, cost in (({}, ""), (priced, " for 5.00 EUR")):
        add_bill(tmp_path, _job("math", 1) | {"status": {"usage": usage, "site": site}})
        text = (tmp_path / "README.md").read_text()
        assert text.endswith(f"the job had held GPUs for 2.0 GPU hours{cost}: 100% training.\n")
        assert not faults(tmp_path, read_manifest(tmp_path), ["README.md"])


def test_a_job_says_where_its_model_is_or_why_there_is_none() -> None:
    stored = _job("math", 1, storage={"claimName": "runs", "subPath": "grpo", "export": {"everySteps": 50}})
    run = "team/math/uid"
    done = stored | {"status": {"export": {"path": f"{run}/exports/step-100", "bytes": 5}}}
    assert exported(done) == Place("runs", f"grpo/{run}/exports/step-100")
    early = stored | {"status": {"phase": "Running", "checkpoint": f"{run}/checkpoints/step-10"}}
    for job, why in [
        (early, f"Running, and it exports every 50 steps.*grpo cp runs:grpo/{run}/checkpoints/step-10/model FOLDER"),
        (_job("math", 1, storage={"claimName": "runs"}), "does not set storage.export"),
        (_job("math", 1, storage={"export": {"everySteps": 1}}), "without storage.claimName"),
    ]:
        with pytest.raises(CliError, match=f"job math has exported no model: .*{why}") as refused:
            exported(job)
        assert refused.value.exit_code == Exit.NOT_FOUND
