"""Another release of the operator takes running jobs over: it touches no pod, and pods that begin later are its own.

A rule that the older release did not have refuses new jobs, and keeps none that has begun from its next attempt.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.controlplane import ControlPlane
from grpo_devcluster.progress import wait_until
from grpo_operator.api import names
from grpo_operator.api.crd import crd, render
from support.control_plane.operators import Jobs, Operator, Release, make_job

THEIRS = Path(__file__).parent / "programs" / "operator_of_another_release.py"
ENGINES = {"groups": [{"name": "gen", "gpus": 1}], "elastic": {"replicas": 2, "maxReplicas": 3}}
SPEC = {
    "generation": {"topology": "Server", "server": ENGINES},
    "failurePolicy": {"onGenerationFailure": "RestartGeneration", "backoffSeconds": 0},
}
OLDER = make_job("older", network={"rdmaCount": 2}, failurePolicy={"backoffSeconds": 0})
CRD = "grpojobs.training.grpo.dev"


@pytest.fixture
def upgrade_crd(kubectl: Any) -> Iterator[Callable[[], None]]:
    """The CRD of another release, without the rules of `network`; the function that it yields installs ours again."""
    rules = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/network/x-kubernetes-validations"
    spec = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    ours = spec["properties"]["network"]["x-kubernetes-validations"]

    def patch(**operation: Any) -> None:
        kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps([operation | {"path": rules}]))

    patch(op="remove")
    yield lambda: patch(op="add", value=ours)
    patch(op="add", value=ours)


@pytest.fixture
def theirs(control_plane: ControlPlane, release: Release, operator: Operator) -> Iterator[Operator]:
    """The running operator of another release, in place of ours."""
    log = control_plane.state / "logs" / "operator-of-another-release.log"
    arguments = (*release.arguments, "--request=cpuPerGpu=3")
    other = Operator(release.kubeconfig, log, arguments, [str(THEIRS)])
    with operator.down():
        other.start()
        yield other
        other.kill()


def _release_of(pod: dict[str, Any]) -> str:
    names = [variable["name"] for variable in pod["spec"]["containers"][0]["env"]]
    return "theirs" if "OF_ANOTHER_RELEASE" in names else "ours"


def _cpus(pods: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return how much cpu pods request, by name."""
    return {name: pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] for name, pod in pods.items()}


def _controller_has_seen_ours(jobs: Jobs) -> bool:
    """Whether the StatefulSet controller has seen another template in each StatefulSet, and pods of the older one."""
    found = [one["status"] | one["metadata"] for one in jobs.list("statefulset", "training.grpo.dev/job=stays")]
    return all(
        one["observedGeneration"] == one["generation"] and one["updateRevision"] != one["currentRevision"]
        for one in found
    )


@pytest.mark.newer  # before 1.33, the API server refuses to write the status of such a job
def test_a_job_that_a_newer_rule_refuses_goes_on(
    jobs: Jobs, upgrade_crd: Callable[[], None], theirs: Operator, operator: Operator
) -> None:
    wait_until(lambda: _is_accepted(jobs, OLDER), "the API server has their CRD", 60, interval=0.2)
    jobs.apply(OLDER)
    jobs.wait_for("older", "Running", "True")
    theirs.kill()
    upgrade_crd()
    new = OLDER | {"metadata": {"name": "new"}}
    wait_until(lambda: not _is_accepted(jobs, new), "our CRD refuses such a job", 60, interval=0.2)
    operator.start()
    jobs.fail("older-b-0")
    jobs.wait_for_attempt("older", 1)


def test_a_stored_job_that_a_newer_rule_of_a_wide_section_refuses_can_be_labelled_and_its_status_written(
    jobs: Jobs, kubectl: Any
) -> None:
    """These rules are evaluated for the whole job, where the API server itself accepts no older fault."""
    path, ours = "/spec/versions/0/schema/openAPIV3Schema/x-kubernetes-validations", crd()["spec"]["versions"][0]
    bad = make_job("bad", managedBy="example.com/nobody", training={"klInReward": True})

    def patch(**operation: Any) -> None:
        kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps([operation | {"path": path}]))

    patch(op="remove")
    try:
        wait_until(lambda: _is_accepted(jobs, bad), "the API server has the older CRD", 60, interval=0.2)
        jobs.apply(bad)
    finally:
        patch(op="add", value=ours["schema"]["openAPIV3Schema"]["x-kubernetes-validations"])
    new = bad | {"metadata": {"name": "new"}}
    wait_until(lambda: not _is_accepted(jobs, new), "our CRD refuses such a job", 60, interval=0.2)
    jobs("label", "grpo", "bad", "team=research")
    jobs.edit("bad", suspend=True)
    jobs("patch", "grpo", "bad", "--subresource=status", "--type=merge", "-p", '{"status": {"phase": "Pending"}}')
    jobs("patch", "grpo", "bad", "--subresource=status", "--type=merge", "-p", '{"status": {"attempt": 1}}')
    with pytest.raises(RuntimeError, match="klInReward needs beta over 0"):
        jobs("patch", "grpo", "bad", "--type=merge", "-p", '{"spec": {"suspend": false, "training": {"maxSteps": 7}}}')


def _is_accepted(jobs: Jobs, job: dict[str, Any]) -> bool:
    try:
        jobs("create", "--dry-run=server", "-f", "-", stdin=json.dumps(job))
    except RuntimeError:
        return False
    return True


def test_pods_keep_running_while_the_operator_is_replaced(jobs: Jobs, theirs: Operator, operator: Operator) -> None:
    jobs.run("stays", **SPEC)
    wait_until(lambda: jobs.status("stays")["elastic"]["replicas"] == 2, "2 engines", 60, interval=0.2)
    before, status = jobs.uids("stays"), jobs.status("stays")
    contract = jobs.get("configmap", "stays-0")["data"]
    assert {_release_of(pod) for pod in jobs.pods("stays").values()} == {"theirs"}

    theirs.kill()
    operator.start()
    wait_until(lambda: _controller_has_seen_ours(jobs), "the StatefulSets have our template", 60, interval=0.2)
    assert jobs.uids("stays") == before
    assert jobs.status("stays") == status
    assert jobs.get("configmap", "stays-0")["data"] == contract

    jobs("scale", "grpo/stays", "--replicas=3")
    wait_until(lambda: "stays-gen-2" in jobs.pods("stays"), "a third engine", 60, interval=0.2)
    new = jobs.pods("stays")["stays-gen-2"]
    assert (_release_of(new), new["metadata"]["labels"]["training.grpo.dev/attempt"]) == ("ours", "0")
    assert before.items() <= jobs.uids("stays").items()

    jobs.fail("stays-b-0")
    jobs.wait_for_attempt("stays", 1)
    # What its pods request is what it began with; a new job's is as ours says.
    cpus = {"stays-a-0": "6", "stays-b-0": "3"} | {f"stays-gen-{ordinal}": "3" for ordinal in range(3)}
    wait_until(lambda: _cpus(jobs.pods("stays")) == cpus, f"pods with {cpus}", 60, interval=0.2)
    assert {_release_of(pod) for pod in jobs.pods("stays").values()} == {"ours"}
    jobs.run("new")
    assert _cpus({"new-a-0": jobs.get("pod", "new-a-0")}) == {"new-a-0": "2"}
    assert jobs.get("pod", "new-a-0")["status"]["qosClass"] == "Burstable"


@pytest.fixture
def their_crd(kubectl: Any) -> Iterator[Callable[[], None]]:
    """The CRD of the other release; the function that it yields installs ours again."""
    theirs = subprocess.run([sys.executable, str(THEIRS), "crd"], capture_output=True, text=True, check=True).stdout

    def install(text: str, default: str) -> None:
        kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
        explained = ("explain", "grpojob.spec.training.numGenerations")
        told = f"Default: {default}."
        wait_until(lambda: told in kubectl(*explained), f"a CRD with {told}", 60, interval=0.5)

    install(theirs, "4")
    yield lambda: install(render(), "8")
    install(render(), "8")


def test_a_job_that_has_begun_keeps_its_defaults_and_its_manifest_can_be_applied_again_however(
    jobs: Jobs, their_crd: Callable[[], None], theirs: Operator, operator: Operator
) -> None:
    by_server = ("apply", "--server-side", "--field-manager=flux", "-f", "-")
    ways = {"server": by_server, "client": ("apply", "-f", "-"), "put": ("replace", "-f", "-")}
    written = {
        name: make_job(name, training={"maxSteps": 7}, failurePolicy={"backoffSeconds": 0}, device={"type": "cuda"})
        for name in ways
    }
    jobs("create", "-f", "-", stdin=json.dumps(written["put"]))
    for name in ("server", "client"):
        jobs(*ways[name], stdin=json.dumps(written[name]))
    for name in ways:
        jobs.wait_for(name, "Running", "True")
    theirs.kill()
    their_crd()
    operator.start()
    for name, way in ways.items():
        before = jobs.get("grpo", name)
        jobs(*way, stdin=json.dumps(written[name]))
        after = jobs.get("grpo", name)
        assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], 1), name
    changed = written["server"] | {"spec": written["server"]["spec"] | {"training": {"numGenerations": 8}}}
    with pytest.raises(RuntimeError, match=r": training\.numGenerations training\.maxSteps cannot change once"):
        jobs(*by_server, stdin=json.dumps(changed))
    jobs.fail("server-b-0")
    jobs.wait_for_attempt("server", 1)
    jobs.run("new")
    assert {name: _defaults_of(jobs, name, attempt) for name, attempt in (("server", 1), ("new", 0))} == {
        "server": (4, "example.com/workload:older"),
        "new": (8, names.DEFAULT_IMAGE),
    }


def _defaults_of(jobs: Jobs, name: str, attempt: int) -> tuple[int, str]:
    """Return what an attempt has of what its job does not set."""
    contract = json.loads(jobs.get("configmap", f"{name}-{attempt}")["data"]["contract.json"])
    pod = jobs.get("pod", f"{name}-a-0")
    return contract["config"]["training"]["numGenerations"], pod["spec"]["containers"][0]["image"]
