"""`kubectl scale` changes the number of engines of a running job, and nothing else may change meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from grpo_devcluster import kwok
from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, make_job, outcome

pytestmark = pytest.mark.api

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
metadata: {name: training}
value: 1000
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: engines}
value: 10
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: between}
value: 100
"""


def test_engines_of_a_lower_priority_give_way_and_come_back_while_the_trainer_runs(jobs: Jobs, kubectl: Any) -> None:
    """The scheduler is real: three nodes, of which another job takes one for a while."""
    nodes = [kwok.node(index, 8) for index in (330, 331, 332)]
    for node in nodes:
        node["metadata"]["labels"]["only"] = "elastic"  # type: ignore[index]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(nodes))
    kubectl("apply", "-f", "-", stdin=CLASSES)
    here = {"nodeSelector": {"only": "elastic"}}
    engines = {"name": "gen", "gpus": 8, "podTemplate": {"priorityClassName": "engines"}}
    server = {"groups": [engines], "elastic": {"replicas": 2, "maxReplicas": 2}}
    try:
        jobs.run(
            "yields",
            trainer={"groups": [{"name": "a", "gpus": 8}]},
            generation={"topology": "Server", "server": server},
            failurePolicy=POLICY | {"maxRestarts": 0},
            podTemplate=here | {"priorityClassName": "training"},
        )
        trainer = uids(jobs, "yields")["yields-a-0"]
        jobs.run(
            "takes",
            trainer={"groups": [{"name": "a", "gpus": 8}]},
            podTemplate=here | {"priorityClassName": "between"},
        )
        taken = jobs.get("pod", "takes-a-0")["spec"]["nodeName"]
        assert taken != jobs.get("pod", "yields-a-0")["spec"]["nodeName"]

        def ready() -> int:
            groups = {group["name"]: group["ready"] for group in jobs.get("grpo", "yields")["status"]["groups"]}
            return int(groups["gen"])

        wait_until(lambda: ready() == 1, "one engine is left", 60, interval=0.2)
        status = jobs.get("grpo", "yields")["status"]
        assert (status["attempt"], status["restarts"]["counted"], uids(jobs, "yields")["yields-a-0"]) == (0, 0, trainer)
        jobs.finish_pod("takes-a-0", 0, outcome(0))
        jobs.wait_for("takes", "Complete", "True")
        wait_until(lambda: ready() == 2, "the engine is back", 60, interval=0.2)
        status = jobs.get("grpo", "yields")["status"]
        assert (status["phase"], status["attempt"], uids(jobs, "yields")["yields-a-0"]) == ("Running", 0, trainer)
    finally:
        kubectl("delete", "node", *(f"kwok-{index}" for index in (330, 331, 332)), "--wait=false")
