"""With scheduling.gang Native all pods of an attempt get nodes, or none, whatever else takes or frees nodes; API server
and scheduler are real."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.cluster.kube import connect
from grpo_devcluster.progress import wait_until
from support.control_plane.fake_nodes import fake_nodes, set_priorities
from support.control_plane.operators import Jobs, make_job, outcome

pytestmark = pytest.mark.newer

NODES = ["kwok-300", "kwok-301"]
SPEC = {
    "trainer": {"groups": [{"name": "a", "replicas": 1, "gpus": 8}, {"name": "b", "replicas": 1, "gpus": 7}]},
    "training": {"promptsPerStep": 16},
    "podTemplate": {"nodeSelector": {"only": "gang"}},
    "scheduling": {"gang": "Native", "timeoutSeconds": 2},
    "failurePolicy": {"backoffSeconds": 1},
}


@pytest.fixture
def nodes(kubectl: Any) -> Iterator[None]:
    """Two nodes for one job; a taint keeps every pod from the second one."""
    with fake_nodes(kubectl, "gang", (300, 301), kept=[301]):
        yield


def _groups(jobs: Jobs) -> dict[str, int]:
    found = jobs.list("podgroups.scheduling.k8s.io", "app.kubernetes.io/managed-by=grpo-operator")
    return {one["metadata"]["name"]: one["spec"]["schedulingPolicy"]["gang"]["minCount"] for one in found}


def test_a_job_that_does_not_fit_holds_nothing_and_jobs_that_fit_one_at_a_time_run_one_after_the_other(
    jobs: Jobs, kubectl: Any, kubeconfig: Path, nodes: None
) -> None:
    for name in ("first", "second"):
        jobs.apply(make_job(name, **SPEC))
        message = jobs.wait_for(name, "Scheduled", "False", "Unschedulable")["message"]
        assert "-0: " in message, message
        sentences = re.split(r"(?<=[.;])\s+", message)
        assert len(sentences) == len({one.rstrip(".;") for one in sentences}), "the scheduler's words are quoted once"
    assert _groups(jobs) == {"first-0": 2, "second-0": 2}
    found = connect(str(kubeconfig), None, jobs.namespace).listed("PodGroup")
    assert [one["metadata"]["name"] for one in found] == ["first-0", "second-0"], "grpo diagnose finds them"
    assert [jobs.nodes("first"), jobs.nodes("second")] == [[], []]

    kubectl("taint", "node", "kwok-301", "kept-")

    def running() -> list[str]:
        return [name for name in ("first", "second") if jobs.status(name).get("phase") == "Running"]

    wait_until(running, "one of them runs", 60, interval=0.2)
    (winner,) = running()
    (other,) = {"first", "second"} - {winner}
    assert [jobs.nodes(winner), jobs.nodes(other)] == [NODES, []]

    jobs.succeed(f"{winner}-a-0", f"{winner}-b-0")
    jobs.wait_for(other, "Running", "True")
    ended, waited = (jobs.status(name) for name in (winner, other))
    assert ended["phase"] == "Succeeded"
    assert (waited["restarts"]["total"], "placement" in waited) == (0, False), "it held nothing, and gave nothing back"

    jobs.finish_pod(f"{other}-b-0", 1, outcome(1))
    wait_until(lambda: f"{other}-1" in _groups(jobs), "its second attempt begins", 60, interval=0.2)
    jobs.wait_for(other, "Running", "True")
    wait_until(lambda: f"{other}-0" not in _groups(jobs), "the first attempt's PodGroup is deleted", 60)
    assert jobs.nodes(other) == NODES


def test_a_job_that_restarts_gets_its_nodes_back_from_one_of_lower_priority_that_waited(
    jobs: Jobs, kubectl: Any, nodes: None
) -> None:
    set_priorities(kubectl, goes_first=1000)
    kubectl("taint", "node", "kwok-301", "kept-")
    template = SPEC["podTemplate"] | {"priorityClassName": "goes-first"}
    jobs.run("first", **(SPEC | {"podTemplate": template}))
    jobs.apply(make_job("second", **SPEC))
    jobs.wait_for("second", "Scheduled", "False", "Unschedulable")
    jobs.finish_pod("first-b-0", 1, outcome(1))

    jobs.wait_for_attempt("first", 1, timeout=90)
    wait_until(lambda: jobs.nodes("second") == [], "the second job waits whole", 60, interval=0.2)
    assert jobs.nodes("first") == NODES
    assert jobs.status("second")["restarts"]["counted"] == 0


def test_a_job_that_restarts_in_place_keeps_its_nodes_although_another_waits_for_them(
    jobs: Jobs, kubectl: Any, nodes: None
) -> None:
    kubectl("taint", "node", "kwok-301", "kept-")
    jobs.run("stays", **(SPEC | {"failurePolicy": {"backoffSeconds": 1, "restartStrategy": "InPlace"}}))
    jobs.apply(make_job("waits", **SPEC))
    jobs.wait_for("waits", "Scheduled", "False", "Unschedulable")
    before = jobs.uids("stays")
    message = "rank 8: RuntimeError: no luck"
    jobs.fail("stays-b-0", message)
    assert "in the same pods" in jobs.wait_for("stays", "Restarting", "True", "RestartingInPlace")["message"]
    jobs.finish_pod("stays-a-0", 69, outcome(69, "PeerLost", "pod stays-b-0 ended"))

    jobs.wait_for("stays", "Restarting", "False", "Restarted")

    status = jobs.status("stays")
    assert (status["attempt"], status["podsAttempt"], status["lastFailure"]["message"]) == (1, 0, message)
    assert json.loads(jobs.get("configmap", "stays-0")["data"]["contract.json"])["attempt"] == 1

    def told() -> set[str]:
        found = [pod["metadata"].get("annotations", {}) for pod in jobs.pods("stays").values()]
        return {annotations.get("training.grpo.dev/attempt", "") for annotations in found}

    wait_until(lambda: told() == {"1"}, "the pods' kubelets get to know it", 60, interval=0.2)
    jobs.runs_again("stays-a-0", "stays-b-0")
    jobs.wait_for("stays", "Running", "True")
    assert [jobs.nodes("stays"), jobs.nodes("waits")] == [NODES, []]
    assert jobs.uids("stays") == before

    jobs("delete", "pod", "stays-a-0", "--wait=false")
    wait_until(lambda: jobs.status("stays")["attempt"] == 2, "an attempt in new pods", 60, interval=0.2)
    assert "podsAttempt" not in jobs.status("stays")
    assert "stays-2" in _groups(jobs)


def test_an_engine_of_a_gang_that_is_replaced_gets_a_node_and_elastic_ones_find_theirs_alone(
    jobs: Jobs, kubectl: Any, nodes: None
) -> None:
    engines = [{"name": "more", "gpus": 8}, {"name": "stay", "gpus": 8}]
    spec = SPEC | {
        "trainer": {"groups": [{"name": "a", "gpus": 8}]},
        "generation": {"topology": "Server", "server": {"groups": engines, "elastic": {"maxReplicas": 1}}},
        "failurePolicy": {"onGenerationFailure": "RestartGeneration"},
    }

    def runs_with(engines: int) -> None:
        said = f"all 2 pods are ready, and {engines} of 1 elastic ones"
        wait_until(lambda: jobs.condition("engines", "Running")["message"].startswith(said), said, 60, interval=0.2)

    with fake_nodes(kubectl, "gang", [302]):
        jobs.run("engines", **spec)
        runs_with(engines=0)
        assert _groups(jobs) == {"engines-0": 2}
        kubectl("taint", "node", "kwok-301", "kept-")
        runs_with(engines=1)
        before = jobs.uids("engines")
        jobs("delete", "pod", "engines-stay-0", "--wait=false")
        replaced = before.pop("engines-stay-0")
        wait_until(lambda: jobs.uids("engines").get("engines-stay-0") not in (None, replaced), "a new pod", 60)
        runs_with(engines=1)
        assert before.items() <= jobs.uids("engines").items()
        assert jobs.nodes("engines") == [*NODES, "kwok-302"]
