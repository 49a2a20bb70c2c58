"""Tools that deploy a GRPOJob read each phase rightly: kstatus itself, and the documented script in Argo CD's Lua.

The statuses are those that passes of the operator's core write; no cluster is needed.
"""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_devcluster import binaries
from grpo_operator.api import names
from grpo_operator.api.crd import crd
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.decide.plan import Obstacle, plan
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode
from grpo_spec.schema import dump
from support.control_plane.jobs import NOW, observed, world
from support.control_plane.passes import A, B, Case, failed
from support.documents import blocks
from support.paths import ROOT


def pending() -> Case:
    return Case()


def running() -> Case:
    case = Case(failurePolicy={"backoffSeconds": 100})
    case.see_all_ready()
    return case


def starting_again() -> Case:
    case = running()
    pods = case.see_all_ready()
    case.see(pods[0], replace(pods[1], ready=False), at=5)
    return case


def restarting() -> Case:
    case = running()
    case.see(failed(A), at=10)
    return case


def suspending() -> Case:
    case = running()
    pods = case.see_all_ready()
    case.edit(suspend=True)
    case.see(*pods, at=10)
    return case


def suspended() -> Case:
    case = suspending()
    case.see(at=20)
    return case


def succeeded() -> Case:
    case = running()
    case.see(*[failed(name, ExitCode.DONE, "Done") for name in (A, B)], at=10)
    case.see(at=20)
    return case


def out_of_restarts() -> Case:
    case = Case(failurePolicy={"maxRestarts": 0})
    pods = case.see_all_ready()
    case.see(failed(A), pods[1], at=10)
    case.see(at=20)
    return case


def refused(reason: Reason) -> GRPOJobStatus:
    made, topology = world()
    return plan(made, topology, GRPOJobStatus(), observed(), {}, NOW, Obstacle(reason, "why")).status


def edited(case: Case) -> Case:
    case.edit()
    case.job = replace(case.job, generation=2)
    case.see(at=40)
    return case


NEW = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["default"]
EXPECTED = {
    # name: (status as the API server returns it, generation, phase, verdict of kstatus, verdict of Argo CD)
    "new": (NEW, 1, None, "InProgress", "Progressing"),
    "pending": (pending(), 1, "Pending", "InProgress", "Progressing"),
    "starting": (starting_again(), 1, "Starting", "InProgress", "Progressing"),
    "running": (running(), 1, "Running", "Current", "Progressing"),
    "restarting": (restarting(), 1, "Restarting", "InProgress", "Progressing"),
    "suspending": (suspending(), 1, "Suspended", "InProgress", "Progressing"),
    "suspended": (suspended(), 1, "Suspended", "Current", "Suspended"),
    "succeeded": (succeeded(), 1, "Succeeded", "Current", "Healthy"),
    "failed": (out_of_restarts(), 1, "Failed", "Failed", "Degraded"),
    "spec refused": (refused(Reason.INVALID_SPEC), 1, "Invalid", "Failed", "Degraded"),
    "claim missing": (refused(Reason.CLAIM_NOT_FOUND), 1, "Invalid", "InProgress", "Progressing"),
    "edit not seen": (succeeded(), 2, "Succeeded", "InProgress", "Progressing"),
    "edited after success": (edited(succeeded()), 2, "Succeeded", "Current", "Healthy"),
    "edited after failure": (edited(out_of_restarts()), 2, "Failed", "Failed", "Degraded"),
}


def _object(status: Any, generation: int) -> dict[str, Any]:
    status = status.status if isinstance(status, Case) else status
    metadata = {"name": "job", "namespace": "ns", "generation": generation}
    written = dump(status) if isinstance(status, GRPOJobStatus) else status
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "status": written}


def test_kstatus_and_argo_cd_read_every_phase(tmp_path: Path) -> None:
    binaries.build("controlplane")
    (script,) = [block.text for block in blocks(ROOT / "docs" / "operating.md") if block.language == "lua"]
    (tmp_path / "health.lua").write_text(script)
    objects = [_object(status, generation) for status, generation, *_ in EXPECTED.values()]
    command = [binaries.binary("verdicts"), tmp_path / "health.lua"]
    said = "\n".join(map(json.dumps, objects))
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    found = {
        name: [one["status"].get("phase"), verdict["kstatus"], verdict["argocd"]]
        for name, one, verdict in zip(EXPECTED, objects, verdicts, strict=True)
    }
    assert found == {name: expected for name, (_, _, *expected) in EXPECTED.items()}
    assert all(verdict["message"] for verdict in verdicts)
