"""More faults of one job on real kubelets, for `make test-long`: each test injects one, then the job trains again.

Asserted: the cause that `lastFailure` gives to a rank out of memory, a killed launcher, a deleted pod and a deleted
StatefulSet; that a deleted pod saves first; that deleted children come back; that an API server that is away ends no
attempt; and that the finished run has every step once. tests/api/test_operator.py and test_restarts.py test with fake
nodes what the operator decides in these cases, tests/trainer/launcher what launchers do.
"""

import time

import pytest

from grpo_devcluster.progress import wait_until
from support.cluster.jobs_on_cluster import SELECTOR
from support.cluster.survivors import TRAINING, Survivor

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def survivor(module_job):
    made = Survivor(module_job)
    made.apply(training=TRAINING | {"maxSteps": 200})
    made.steps(5)
    yield made
    made.report()


def test_a_rank_beyond_the_memory_limit_is_named_with_the_field_to_raise(survivor):
    with survivor.recovers("a rank beyond the memory limit", "RankFailed"):
        (survivor.data / "hog-1").write_text("")
    message = survivor.status()["lastFailure"]["message"]
    assert "ran out of memory: raise podTemplate.resources.limits.memory" in message


def test_a_killed_launcher_is_named_by_its_pod(survivor):
    with survivor.recovers("SIGKILL of a launcher", None):
        survivor.kill("tiny-a-0", "grpo_workload.trainer_pod")
    assert survivor.status()["lastFailure"]["pod"] == "tiny-a-0"


def test_a_deleted_pod_saves_first(survivor):
    step = survivor.status()["progress"]["step"]
    with survivor.recovers("kubectl delete pod", "PodReplaced"):
        survivor.job("delete", "pod", "tiny-b-0")
    assert survivor.status()["progress"]["step"] >= step, "a pod that is asked to end saves first: nothing is lost"


def test_a_deleted_statefulset_is_recreated(survivor):
    with survivor.recovers("kubectl delete statefulset", "PodReplaced"):
        survivor.job("delete", "statefulset", "tiny-a", "--wait=false")


def test_deleted_children_and_an_api_server_that_is_away_end_no_attempt(survivor, devcluster):
    job = survivor.job
    before = survivor.status()
    job("delete", "service,configmap,networkpolicy", "-l", SELECTOR)
    wait_until(
        lambda: len(job("get", "service,configmap,networkpolicy", "-l", SELECTOR, "-o", "name").split()) == 3,
        "children are back",
        60,
    )
    (apiserver,) = [daemon for daemon in devcluster.daemons() if "apiserver" in daemon.name]
    apiserver.stop(grace=0)
    try:
        time.sleep(20)
    finally:
        apiserver.start()
    wait_until(lambda: _answers(job), "the API server is back", 120)
    survivor.steps(before["progress"]["step"])
    assert survivor.status()["attempt"] == before["attempt"]


def test_the_run_has_every_step_once_and_in_order(survivor):
    survivor.completes()
    assert survivor.status()["restarts"]["total"] == len(survivor.recoveries)


def _answers(job):
    try:
        job("get", "grpojob")
    except RuntimeError:
        return False
    return True
