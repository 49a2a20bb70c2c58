"""The view Memory of `grpo ui`, without a browser: it gets what `grpo plan` says of the same document, once made."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession
from click.testing import CliRunner
from kubernetes import client

from grpo_cli.cluster.kube import Kube
from grpo_cli.documents.manifest import load_job
from grpo_cli.local.edited import pod_sizes
from grpo_cli.local.planning import answer, question
from grpo_cli.main import main
from grpo_cli.screen.memory_plan import verdict
from grpo_cli.screen.view import read_job
from grpo_cli.ui import plans
from grpo_cli.ui.cluster import ClusterSource
from grpo_cli.ui.folder import FolderSource
from grpo_cli.ui.server import serving
from grpo_cli.ui.source import Shown
from grpo_operator.api.spec import parse_spec
from grpo_operator.layout.job import Job
from grpo_spec.gpus import gpu_bytes
from support.control_plane.jobs import job as make_job
from support.paths import EXAMPLES, RUN_FOLDER
from support.trainer.tiny_model import make_tiny_model

MANIFEST = EXAMPLES / "one-node-4+1.yaml"


class _OneJob:
    def __init__(self, job: Job | None) -> None:
        self.shown = Shown(title="a job", where="here", job={}, to_plan=job)

    def refresh(self) -> None:
        """It never changes."""


def _stored(manifest: Path, uid: str) -> Job:
    """A manifest's job as the page reads it from a cluster."""
    document = load_job(manifest).document
    document["metadata"] |= {"namespace": "default", "uid": uid}
    job = read_job(document)
    assert job is not None
    return job


async def _get(session: ClientSession, url: str) -> tuple[int, Any]:
    async with session.get(url) as got:
        return got.status, json.loads(text) if (text := await got.text()).startswith("{") else text


async def _ended(session: ClientSession, url: str) -> Any:
    """Ask as a browser does, until there is a plan or none will come."""
    for _ in range(600):
        _, got = await _get(session, url)
        if got != {"state": "pending"}:
            return got
        await asyncio.sleep(0.1)
    raise AssertionError("no plan in a minute")


async def test_it_gets_the_plan_that_grpo_plan_makes(tmp_path: Path) -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["spec"]["model"] = {"path": str(make_tiny_model(tmp_path / "model", heads=4))}
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    job = load_job(path).job("default")
    asked = question(job, gpu_bytes("l4"))
    assert asked is not None
    made = asyncio.create_task(asyncio.to_thread(answer, asked))
    async with serving(_OneJob(_stored(path, job.uid)), 0, gpu_bytes("l4")) as address, ClientSession() as session:
        assert (await _get(session, f"{address}api/plan"))[1] == {"state": "pending"}
        got = await _ended(session, f"{address}api/plan")
    plan = await made
    assert got == {"state": "made", "plan": plan, "lines": list(verdict(plan))}
    assert {place["name"] for place in plan["places"]} >= {"rank 0 (one-node-node-0)"}


def test_the_job_of_a_cluster_and_of_a_manifest_are_one_question() -> None:
    for path in sorted(EXAMPLES.glob("*.yaml")):
        job = load_job(path).job("default")
        assert question(job, 80 << 30) == question(_stored(path, job.uid), 80 << 30), path.name


@pytest.mark.parametrize("attempt", [None, 0])
def test_a_job_that_has_not_begun_is_planned_with_what_its_site_says(
    monkeypatch: pytest.MonkeyPatch, attempt: int | None
) -> None:
    document = load_job(MANIFEST).document
    now = datetime.now(UTC).isoformat()
    document["metadata"] |= {"namespace": "default", "uid": "a", "creationTimestamp": now}
    document["status"] = {"attempt": attempt}
    selector = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    site = {"metadata": {"generation": 1}, "spec": {"defaults": {"podTemplate": {"nodeSelector": selector}}}}
    monkeypatch.setattr(Kube, "job", lambda *_: document)
    monkeypatch.setattr(Kube, "pods", lambda *_: [])
    monkeypatch.setattr(Kube, "listed", lambda *_: [])
    monkeypatch.setattr(Kube, "named", lambda *_: site)
    api = client.ApiClient(client.Configuration(host="http://127.0.0.1:1"))
    source = ClusterSource(Kube(api, "default"), "math")
    source.refresh()
    assert source.shown.to_plan is not None
    asked = question(source.shown.to_plan, None)
    assert (asked is not None) is (attempt is None), "a job that has begun keeps what its site said then"


async def test_it_asks_for_a_gpu_that_nothing_says() -> None:
    async with serving(_OneJob(_stored(MANIFEST, "a")), 0) as address, ClientSession() as session:
        assert (await _get(session, f"{address}api/plan"))[1] == {"state": "GPU unknown"}
        assert "h200" in (await _get(session, f"{address}api/state"))[1]["gpus"]
        status, said = await _get(session, f"{address}api/plan?gpu=80Gi")
        assert (status, said.startswith("gpu must be one of h100, h200")) == (400, True)


async def test_a_model_that_is_missing_is_named_and_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "RETRY_SECONDS", 0.1)
    path = tmp_path / "model"
    job = _stored(MANIFEST, "a")
    spec = job.spec.model_copy(update={"model": job.spec.model.model_copy(update={"name": None, "path": str(path)})})
    async with serving(_OneJob(replace(job, spec=spec)), 0) as address, ClientSession() as session:
        got = await _ended(session, f"{address}api/plan?gpu=l4")
        assert (got["state"], str(path) in got["error"]) == ("failed", True)
        make_tiny_model(path, heads=4)
        await asyncio.sleep(0.2)
        assert (await _ended(session, f"{address}api/plan?gpu=l4"))["state"] == "made"


async def test_a_job_whose_pods_cannot_be_made_has_no_plan() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    many = [{"name": f"A{number}", "value": "x"} for number in range(200)]
    job = _stored(MANIFEST, "a")
    other = {"env": [{"name": f"B{number}", "value": "x"} for number in range(200)]}
    group = manifest["spec"]["trainer"]["groups"][0] | {"podTemplate": other}
    spec = parse_spec(manifest["spec"] | {"podTemplate": {"env": many}, "trainer": {"groups": [group]}})
    async with serving(_OneJob(replace(job, spec=spec)), 0) as address, ClientSession() as session:
        status, got = await _get(session, f"{address}api/plan?gpu=l4")
    assert (status, got["state"]) == (200, "failed")
    assert "at most 256 items" in got["error"]


@pytest.mark.parametrize(("limit", "size"), [("1.5Gi", 3 << 29), ("64G", 64 * 10**9), ("64", 64), ("lotsi", None)])
def test_a_limit_of_memory_is_read_as_kubernetes_does(limit: str, size: int | None) -> None:
    limits, _ = pod_sizes(make_job(podTemplate={"resources": {"limits": {"memory": limit}}}))
    assert set(limits.values()) == ({size} if size else set())


async def test_a_folder_and_an_invalid_job_have_no_such_view() -> None:
    for source in (FolderSource(RUN_FOLDER), _OneJob(None)):
        async with serving(source, 0) as address, ClientSession() as session:
            assert (await _get(session, f"{address}api/state"))[1]["gpus"] is None
            assert (await _get(session, f"{address}api/plan?gpu=l4"))[0] == 404
    refused = CliRunner().invoke(main, ["ui", "--folder", str(RUN_FOLDER), "--gpu", "h100"])
    assert (refused.exit_code, "give either a JOB, with --gpu or without" in refused.output) == (2, True)
