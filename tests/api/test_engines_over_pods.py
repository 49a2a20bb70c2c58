"""An engine over two pods: they are suspended, resumed and replaced as one, and how many pods it has changes only
while no engine runs.
"""

import json
from typing import Any

import pytest

from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, outcome

ENGINES = {"name": "gen", "replicas": 2, "gpus": 8, "podsPerEngine": 2}
SPEC: dict[str, Any] = {
    "trainer": {"groups": [{"name": "a", "replicas": 1, "gpus": 1}]},
    "generation": {"topology": "Server", "server": {"groups": [ENGINES]}},
    "failurePolicy": {"onGenerationFailure": "RestartGeneration", "backoffSeconds": 0},
}


def _engines(jobs: Jobs) -> dict[str, list[str]]:
    """Return the first pod of each engine in the contract, and the others of it."""
    (contract,) = jobs.list("configmap", "training.grpo.dev/job=wide")
    engines = json.loads(contract["data"]["contract.json"])["engines"]
    return {one["pod"]: [other["pod"] for other in one.get("followers", ())] for one in engines}


def test_an_engine_over_two_pods_is_suspended_resumed_and_divided_anew(jobs: Jobs) -> None:
    jobs.run("wide", **SPEC)
    begun = jobs.uids("wide")
    assert sorted(begun) == ["wide-a-0", "wide-gen-0", "wide-gen-1"]
    divided = {"generation": {"server": {"groups": [ENGINES | {"podsPerEngine": 1}]}}}
    for change in (divided, {"generation": {"server": {"groups": [ENGINES | {"replicas": 4}]}}}):
        with pytest.raises(RuntimeError, match=r"generation\.server\.groups can change only while the job is susp"):
            jobs.edit("wide", **change)

    jobs.edit("wide", suspend=True)
    jobs.wait_for("wide", "Suspended", "True")
    assert jobs.uids("wide") == {}, "both pods of the engine are gone"
    jobs.edit("wide", suspend=False)
    jobs.wait_for("wide", "Running", "True")
    resumed = jobs.uids("wide")
    assert resumed.keys() == begun.keys()
    assert not {*resumed.values()} & {*begun.values()}
    assert _engines(jobs) == {"wide-gen-0": ["wide-gen-1"]}

    jobs.finish_pod("wide-gen-1", 70, outcome(70, "EngineDied", attempt=1))
    wait_until(lambda: len(jobs.uids("wide").items() - resumed.items()) == 2, "both pods are others", 60, interval=0.2)
    assert jobs.uids("wide")["wide-a-0"] == resumed["wide-a-0"]
    assert jobs.status("wide")["lastFailure"]["pod"] == "wide-gen-1"
    jobs.edit("wide", suspend=True)
    jobs.wait_for("wide", "Suspended", "True")
    assert jobs.uids("wide") == {}, "also of an engine that was replaced"

    with pytest.raises(RuntimeError, match="podsPerEngine must divide replicas, the number of pods"):
        jobs.edit("wide", generation={"server": {"groups": [ENGINES | {"replicas": 3}]}})
    jobs.edit("wide", **divided, suspend=False)
    jobs.wait_for("wide", "Running", "True")
    assert sorted(jobs.uids("wide")) == sorted(begun)
    assert _engines(jobs) == {"wide-gen-0": [], "wide-gen-1": []}
