"""`kubectl scale` changes the number of engines of a running job, and nothing else may change meanwhile."""

from __future__ import annotations

import pytest

from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, make_job

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
