"""`kubectl scale` changes the number of engines of a running job, and nothing else may change meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from grpo_devcluster import kwok
from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, make_job, outcome

GENERATION = {
    "topology": "Server",
    "server": {"groups": [{"name": "gen", "gpus": 1}], "elastic": {"replicas": 2, "maxReplicas": 3}},
}
POLICY = {"onGenerationFailure": "RestartGeneration"}


def uids(jobs: Jobs, name: str) -> dict[str, str]:
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in jobs.list("pod", f"training.grpo.dev/job={name}")
    }


def test_engines_scale_while_the_job_runs(jobs: Jobs) -> None:
    def wait_for_engines(number: int) -> None:
        wait_until(
            lambda: jobs.get("grpo", "elastic")["status"]["elastic"]["replicas"] == number,
            f"{number} engine pods",
            60,
            interval=0.2,
        )

    def scale(number: int) -> None:
        jobs("scale", "grpo/elastic", f"--replicas={number}")
        wait_for_engines(number)

    jobs.run("elastic", generation=GENERATION, failurePolicy=POLICY)
    wait_for_engines(2)
    before = uids(jobs, "elastic")
    assert sorted(before) == ["elastic-a-0", "elastic-b-0", "elastic-gen-0", "elastic-gen-1"]
    scale(3)
    grown = uids(jobs, "elastic")
    assert {name: grown[name] for name in before} == before
    scale(1)
    assert uids(jobs, "elastic") == {name: uid for name, uid in before.items() if name != "elastic-gen-1"}
    status = jobs.get("grpo", "elastic")["status"]
    assert (status["phase"], status["attempt"], status["restarts"]["total"]) == ("Running", 0, 0)

    with pytest.raises(RuntimeError, match="replicas must be at most maxReplicas; 3 would work"):
        jobs("scale", "grpo/elastic", "--replicas=4")
    for change in ('{"elastic": {"maxReplicas": 4}}', '{"elastic": null}', '{"port": 9000}'):
        patch = f'{{"spec": {{"generation": {{"server": {change}}}}}}}'
        with pytest.raises(RuntimeError, match=r"of generation, only replicas and minReplicas of server\.elastic can"):
            jobs("patch", "grpo", "elastic", "--type=merge", "-p", patch)


def test_elastic_engines_need_ranks_that_go_on_without_them(jobs: Jobs) -> None:
    with pytest.raises(RuntimeError, match=r"elastic needs failurePolicy\.onGenerationFailure RestartGeneration"):
        jobs.apply(make_job("rigid", generation=GENERATION))


CLASSES = """
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: elastic-training}
value: 1000
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: elastic-engines}
value: 10
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: elastic-urgent}
value: 10000
"""


def test_engines_of_a_lower_priority_give_way_and_come_back_while_the_trainer_runs(jobs: Jobs, kubectl: Any) -> None:
    """The scheduler is real: four nodes, of which another job takes those of all elastic engines for a while."""
    nodes = [kwok.node(index, 8) for index in (330, 331, 332, 333)]
    for node in nodes:
        node["metadata"]["labels"]["only"] = "elastic"  # type: ignore[index]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(nodes))
    kubectl("apply", "-f", "-", stdin=CLASSES)
    here = {"nodeSelector": {"only": "elastic"}}
    engines = {"name": "gen", "gpus": 8, "podTemplate": {"priorityClassName": "elastic-engines"}}
    server = {"groups": [engines, {"name": "stay", "gpus": 8}], "elastic": {"replicas": 2, "maxReplicas": 2}}
    stays = ("yields-a-0", "yields-stay-0")

    def seen() -> tuple[str, int, int, list[str]]:
        status, known = jobs.get("grpo", "yields")["status"], uids(jobs, "yields")
        return status["phase"], status["attempt"], status["restarts"]["counted"], [known[pod] for pod in stays]

    def wait_for_engines(number: int) -> None:
        said = f"all 2 pods are ready, and {number} of 2 elastic ones"
        wait_until(lambda: jobs.condition("yields", "Running")["message"].startswith(said), said, 60, interval=0.2)

    try:
        jobs.run(
            "yields",
            trainer={"groups": [{"name": "a", "gpus": 8}]},
            generation={"topology": "Server", "server": server},
            failurePolicy=POLICY | {"maxRestarts": 0},
            podTemplate=here | {"priorityClassName": "elastic-training"},
        )
        wait_for_engines(2)
        before = seen()
        assert before[:3] == ("Running", 0, 0)
        jobs.run(
            "takes",
            trainer={"groups": [{"name": "a", "replicas": 2, "gpus": 8}]},
            training={"promptsPerStep": 16},
            podTemplate=here | {"priorityClassName": "elastic-urgent"},
        )
        wait_for_engines(0)
        assert "yields-gen-0 has no node: " in jobs.condition("yields", "Running")["message"]
        assert "lastFailure" not in jobs.get("grpo", "yields")["status"]
        assert seen() == before
        for ordinal in range(2):
            jobs.finish_pod(f"takes-a-{ordinal}", 0, outcome(0))
        jobs.wait_for("takes", "Complete", "True")
        wait_for_engines(2)
        assert seen() == before
    finally:
        kubectl("delete", "node", *(f"kwok-{index}" for index in (330, 331, 332, 333)), "--wait=false")
