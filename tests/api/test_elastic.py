"""`kubectl scale` changes the number of engines of a running job, and nothing else may change meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_devcluster.progress import wait_until
from support.control_plane.fake_nodes import fake_nodes, set_priorities
from support.control_plane.operators import Jobs

GENERATION = {
    "topology": "Server",
    "server": {"groups": [{"name": "gen", "gpus": 1}], "elastic": {"replicas": 2, "maxReplicas": 3}},
}
POLICY = {"onGenerationFailure": "RestartGeneration"}


def test_engines_scale_while_the_job_runs(jobs: Jobs) -> None:
    def wait_for_engines(number: int) -> None:
        told = f"{number} engine pods"
        wait_until(lambda: jobs.status("elastic")["elastic"]["replicas"] == number, told, 60, interval=0.2)

    def scale(number: int) -> None:
        jobs("scale", "grpo/elastic", f"--replicas={number}")
        wait_for_engines(number)

    jobs.run("elastic", generation=GENERATION, failurePolicy=POLICY)
    wait_for_engines(2)
    before = jobs.uids("elastic")
    assert sorted(before) == ["elastic-a-0", "elastic-b-0", "elastic-gen-0", "elastic-gen-1"]
    scale(3)
    grown = jobs.uids("elastic")
    assert {name: grown[name] for name in before} == before
    scale(1)
    assert jobs.uids("elastic") == {name: uid for name, uid in before.items() if name != "elastic-gen-1"}
    status = jobs.status("elastic")
    assert (status["phase"], status["attempt"], status["restarts"]["total"]) == ("Running", 0, 0)

    with pytest.raises(RuntimeError, match="replicas must be at most maxReplicas; 3 would work"):
        jobs("scale", "grpo/elastic", "--replicas=4")
    for change in ('{"elastic": {"maxReplicas": 4}}', '{"elastic": null}', '{"port": 9000}'):
        patch = f'{{"spec": {{"generation": {{"server": {change}}}}}}}'
        with pytest.raises(RuntimeError, match=r"of generation, only replicas and minReplicas of server\.elastic can"):
            jobs("patch", "grpo", "elastic", "--type=merge", "-p", patch)


def test_engines_of_a_lower_priority_give_way_and_come_back_while_the_trainer_runs(jobs: Jobs, kubectl: Any) -> None:
    """The scheduler is real: four nodes, of which another job takes those of all elastic engines for a while."""
    set_priorities(kubectl, elastic_training=1000, elastic_engines=10, elastic_urgent=10_000)
    here = {"nodeSelector": {"only": "elastic"}}
    engines = {"name": "gen", "gpus": 8, "podTemplate": {"priorityClassName": "elastic-engines"}}
    server = {"groups": [engines, {"name": "stay", "gpus": 8}], "elastic": {"replicas": 2, "maxReplicas": 2}}
    stays = ("yields-a-0", "yields-stay-0")

    def seen() -> tuple[str, int, int, list[str]]:
        status, known = jobs.status("yields"), jobs.uids("yields")
        return status["phase"], status["attempt"], status["restarts"]["counted"], [known[pod] for pod in stays]

    def wait_for_engines(number: int) -> None:
        said = f"all 2 pods are ready, and {number} of 2 elastic ones"
        wait_until(lambda: jobs.condition("yields", "Running")["message"].startswith(said), said, 60, interval=0.2)

    with fake_nodes(kubectl, "elastic", range(330, 334)):
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
        assert "lastFailure" not in jobs.status("yields")
        assert seen() == before
        jobs.succeed("takes-a-0", "takes-a-1")
        jobs.wait_for("takes", "Complete", "True")
        wait_for_engines(2)
        assert seen() == before
