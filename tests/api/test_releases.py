"""Releases by `helm`: jobs survive a CRD that changes its owner and version, and releases do not overlap.

Nodes are fake: the operator's pod becomes ready and runs nothing. The end-to-end tests run the real one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster import binaries, kube
from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from support.control_plane import audit
from support.control_plane.operators import Jobs, Operator, kubeconfig_of, make_job
from support.paths import ROOT

CHART = ROOT / "charts" / "grpo-operator"
CRDS = [f"grpo{kind}.training.grpo.dev" for kind in ("jobs", "defaults", "clusterdefaults")]
Helm = Callable[..., str]


@pytest.fixture
def helm(control_plane: ControlPlane, kubectl: Any) -> Iterator[Helm]:
    """`helm(...)`; after the test all releases are uninstalled, which keeps the CRD."""

    def run(*args: str) -> str:
        return kube.helm(control_plane.kubeconfig, *args)

    yield run
    for release in json.loads(run("list", "--all-namespaces", "-o", "json")):
        run("uninstall", release["name"], "--namespace", release["namespace"])


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An older chart, from before GRPOJobs could be suspended."""
    chart = tmp_path_factory.mktemp("older") / "grpo-operator"
    shutil.copytree(CHART, chart)
    file = chart / "files" / "grpojobs.training.grpo.dev.yaml"
    crd = yaml.safe_load(file.read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["spec"]["properties"]["suspend"]
    file.write_text(yaml.safe_dump(crd))
    about = chart / "Chart.yaml"
    about.write_text(re.sub(r"^version: .*$", "version: 0.0.9", about.read_text(), flags=re.MULTILINE))
    return chart


def _knows_suspend(jobs: Jobs) -> bool:
    """Whether the API server keeps the field `suspend` and does not drop it."""
    create = ("create", "--dry-run=server", "--validate=false", "-o", "json", "-f", "-")
    return "suspend" in json.loads(jobs(*create, stdin=json.dumps(make_job("asked", suspend=True))))["spec"]


def _go_back(control_plane: ControlPlane, jobs: Jobs) -> None:
    """Run the commands of the page, for the release `mine`."""
    section = (ROOT / "docs/operating.md").read_text().partition("\n## Go back to the release before\n")[2]
    commands = re.findall(r"^    (.+)$", section.partition("\n## ")[0], re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["history", "rollback", "get"]
    path = f"{binaries.bin_dir()}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"KUBECONFIG": str(control_plane.kubeconfig), "PATH": path}
    for command in commands:
        mine = command.replace("grpo-operator --namespace grpo-system", f"mine --namespace {jobs.namespace}")
        done = subprocess.run(["bash", "-ec", mine], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{mine}: {done.stderr}"
    assert re.search(rf"{jobs.namespace} +stays .*Running", done.stdout)
    wait_until(lambda: not _knows_suspend(jobs), "the older CRD is served again", 60, interval=0.2)


def _run_with_an_older_crd(operator: Operator, jobs: Jobs) -> None:
    """Start an operator that is newer than its CRD: it says so once, and jobs run."""
    log = len(operator.log.read_text())
    operator.start()
    jobs.run("later")
    lacks = "the CRD is older than this operator and lacks spec.suspend: kubectl apply --server-side -f crds/"
    wait_until(lambda: lacks in operator.log.read_text()[log:], "the operator names the field", 60)
    assert operator.log.read_text()[log:].count(lacks) == 1
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics", timeout=30) as answer:
        assert "\ngrpo_operator_crd_missing_fields 1.0\n" in answer.read().decode()
    jobs("delete", "grpo", "later")
    operator.kill()


def test_a_crd_installed_by_hand_is_taken_over_upgraded_and_survives_with_its_jobs(
    control_plane: ControlPlane, operator: Operator, jobs: Jobs, helm: Helm, kubectl: Any, older: Path
) -> None:
    jobs.run("stays")
    uid, pods = jobs.get("grpo", "stays")["metadata"]["uid"], jobs.uids("stays")
    where = ("--namespace", jobs.namespace, "--set", f"watchNamespaces={{{jobs.namespace}}}")
    with operator.down():
        with pytest.raises(RuntimeError, match=r'CustomResourceDefinition "grpo\w+\..* invalid ownership metadata'):
            helm("install", "mine", str(older), *where)
        helm("install", "mine", str(older), *where, "--take-ownership", "--force-conflicts")
        wait_until(lambda: not _knows_suspend(jobs), "the older CRD is served", 60, interval=0.2)
        helm("upgrade", "mine", str(CHART), *where)
        wait_until(lambda: _knows_suspend(jobs), "the newer CRD is served", 60, interval=0.2)
        _go_back(control_plane, jobs)
        _run_with_an_older_crd(operator, jobs)
        assert jobs.uids("stays") == pods
        helm("upgrade", "mine", str(CHART), *where)
        wait_until(lambda: _knows_suspend(jobs), "the newer CRD is served again", 60, interval=0.2)
        helm("uninstall", "mine", "--namespace", jobs.namespace)
        assert kubectl("get", "crd", *CRDS, "-o", "name")
        stays = jobs.get("grpo", "stays")
        assert (stays["metadata"]["uid"], stays["status"]["phase"]) == (uid, "Running")
        assert jobs.uids("stays") == pods
    owner = ("meta.helm.sh/release-name=again", f"meta.helm.sh/release-namespace={jobs.namespace}")
    kubectl("label", "crd", *CRDS, "--overwrite", "app.kubernetes.io/managed-by=Helm")
    kubectl("annotate", "crd", *CRDS, "--overwrite", *owner)
    helm("install", "again", str(CHART), *where)
    assert "suspend" in jobs("explain", "grpojob.spec")


def test_an_attempt_keeps_the_contract_that_another_release_of_the_operator_wrote(
    operator: Operator, jobs: Jobs
) -> None:
    jobs.run("upgraded")
    with operator.down():
        written = jobs.get("configmap", "upgraded-0")
        contract = written["data"]["contract.json"].replace("{", '{"aFieldOfAnotherRelease": 1,', 1)
        written["data"] = {"contract.json": contract}
        for key in ("uid", "resourceVersion", "creationTimestamp"):
            del written["metadata"][key]
        jobs("delete", "configmap", "upgraded-0")
        jobs.apply(written)
    jobs("scale", "statefulset", "upgraded-b", "--replicas=3")
    wait_until(lambda: jobs.replicas("upgraded")["upgraded-b"] == 1, "the operator corrects the scale", 60)
    assert jobs.get("configmap", "upgraded-0")["data"]["contract.json"] == contract


def test_the_check_of_an_installation_says_what_is_wrong_and_needs_no_other_rights(
    control_plane: ControlPlane, operator: Operator, kubectl: Any, namespace: str
) -> None:
    """Run what `helm test` starts. The operator is a process here; a pod without a node has its address."""
    rendered = kube.helm(
        control_plane.kubeconfig,
        "template",
        "own",
        str(CHART),
        "--show-only=templates/tests/check.yaml",
        f"-n={namespace}",
    )
    *access, pod = yaml.safe_load_all(rendered)
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(access))
    account = pod["spec"]["serviceAccountName"]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig_of(control_plane, kubectl, namespace, account))}
    module, arguments = pod["spec"]["containers"][0]["command"][1:], pod["spec"]["containers"][0]["args"]

    def check(port: int, seconds: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *module, *arguments, f"--port={port}", f"--timeout={seconds}"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    missing = check(operator.port, 0)
    assert missing.returncode == 1
    assert f"no pod of the operator runs in {namespace}" in missing.stderr
    labels = dict(pair.split("=") for pair in arguments[1].removeprefix("--selector=").split(","))
    stand_in = {
        "metadata": {"name": "operator", "namespace": namespace, "labels": labels},
        "apiVersion": "v1",
        "kind": "Pod",
    }
    spec = {
        "schedulingGates": [{"name": "tests.example.com/never"}],
        "containers": [{"name": "operator", "image": "example.invalid/any"}],
    }
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(stand_in | {"spec": spec}))
    Jobs(kubectl, namespace).report("operator", podIP="127.0.0.1", podIPs=[{"ip": "127.0.0.1"}])
    assert "the operator does not answer on http://127.0.0.1:1/healthz" in check(1, 0).stderr
    well = check(operator.port, 30)
    assert (well.returncode, well.stderr) == (0, "")
    assert audit.denials(control_plane.audit_log, f"system:serviceaccount:{namespace}:{account}") == []


def test_a_release_that_would_overlap_another_is_refused(helm: Helm, namespace: str, other_namespace: str) -> None:
    def install(name: str, into: str, *watched: str, more: tuple[str, ...] = ()) -> str:
        scope = ("--set", f"watchNamespaces={{{','.join(watched)}}}") if watched else ()
        return helm("install", name, str(CHART), "--namespace", into, "--set", "crds.install=false", *scope, *more)

    install("one", namespace, namespace)
    install("two", other_namespace, other_namespace)
    taken = f"release one in namespace {namespace} already runs the jobs of {namespace}"
    with pytest.raises(RuntimeError, match=taken):
        install("three", other_namespace, namespace)
    with pytest.raises(RuntimeError, match=r"already runs the jobs of "):
        install("everything", other_namespace)
    install("everything", other_namespace, more=("--set", "refuseOverlap=false"))
    taken = f"release everything in namespace {other_namespace} already runs the jobs of all namespaces"
    with pytest.raises(RuntimeError, match=taken):
        helm("upgrade", "two", str(CHART), "--namespace", other_namespace, "--reuse-values")
    helm("uninstall", "everything", "--namespace", other_namespace)
    helm("upgrade", "two", str(CHART), "--namespace", other_namespace, "--reuse-values")
