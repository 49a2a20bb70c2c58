"""One job on real kubelets: each test injects one fault, after which the job trains again. Recovery times are printed.

Asserted: the cause that `lastFailure` gives to a cut network and to a killed rank; that the first makes all pods new,
and the second keeps them; that an operator killed during a restart continues it; that a suspended job has saved all its
steps and goes on in another shape; what `grpo` shows of the job; and that the finished run has every step once.
test_more_faults.py has more faults, for `make test-long`.
"""

import json
import subprocess
from pathlib import Path

import pytest

from grpo_devcluster.progress import wait_until
from support.cluster.surface import check_surface
from support.cluster.survivors import Survivor

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def survivor(module_job):
    made = Survivor(module_job)
    # Without a back-off a restart in place is over in a second.
    made.apply(failurePolicy={"backoffSeconds": 3, "maxRestarts": 20, "restartStrategy": "InPlace"})
    made.steps(3)
    yield made
    made.report()


def test_the_command_line_shows_a_job_that_trains(survivor):
    check_surface(survivor.job)


def test_ranks_whose_network_is_cut_end_and_publish_nothing_beside_the_next_attempt(survivor):
    """Rank 0's pod reaches only the storage. The last test would see steps that two attempts have published."""
    with survivor.recovers("the network of a pod cut", "PeerLost"):
        _cut_network(survivor.job.get_pod("tiny-a-0")["metadata"]["uid"])
    failure = survivor.status()["lastFailure"]
    assert "has not answered for" in failure["message"], failure


def test_a_killed_rank_is_named_and_another_operator_goes_on_with_the_restart_in_place(survivor):
    job, where = survivor.job, ("-n", "grpo-system")
    before = survivor.status()
    leader = job.kubectl("get", "lease", "grpo-operator", *where, "-o", "jsonpath={.spec.holderIdentity}")
    with survivor.recovers("a rank killed, and the operator that acts during the restart", "RankFailed"):
        survivor.kill("tiny-b-0", "grpo_workload.rank")
        job.wait_for("Restarting", 120)
        job.kubectl("delete", "pod", leader, *where, "--force", "--grace-period=0")
    status = survivor.status()
    failure = status["lastFailure"]
    pods_attempt = before.get("podsAttempt", before["attempt"])  # the suite tries a test that failed again
    assert (status["attempt"], status["podsAttempt"]) == (before["attempt"] + 1, pods_attempt)
    assert [one["uid"] for one in status["members"]] == [one["uid"] for one in before["members"]], "in the same pods"
    assert failure["pod"] == "tiny-b-0"
    assert "rank 1 was killed by SIGKILL" in failure["message"]
    if (
        job.get_pod("tiny-b-0")["status"]["containerStatuses"][0]["restartCount"] == 1
    ):  # for later ones the kubelet waits
        assert "the ranks have loaded their programs ahead" in job("logs", "tiny-b-0")


def test_a_suspended_job_saves_and_goes_on_with_another_number_of_ranks(survivor):
    job = survivor.job
    before = survivor.status()
    # Steps take a second. The stop then comes between two checkpoints of the schedule, which are five steps apart.
    wait_until(lambda: len(job.metrics(survivor.data)) % 5 == 1, "a step after a checkpoint", 120)
    job("patch", "grpojob", "tiny", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    wait_until(
        lambda: job.conditions().get("Suspended", {}).get("reason") == "Suspended", "all pods saved and ended", 240, 0.5
    )
    assert not job("get", "pods", "-o", "name")
    saved = {path.name for path in (survivor.folder() / "checkpoints").glob("step-*")}
    assert f"step-{len(job.metrics(survivor.data))}" in saved, "every step that was made was saved"

    shape = {"suspend": False, "trainer": {"groups": [{"name": "b", "replicas": 1, "gpus": 1}]}}
    job("patch", "grpojob", "tiny", "--type=merge", "-p", json.dumps({"spec": shape}))
    wait_until(lambda: survivor.status()["phase"] == "Running", "the job runs again", 360, interval=0.5)
    status = survivor.status()
    assert (status["attempt"], status["restarts"]) == (before["attempt"] + 1, before["restarts"])
    assert [member["pod"] for member in status["members"]] == ["tiny-b-0"]


def test_the_run_has_every_step_once_and_in_order(survivor):
    survivor.completes()
    assert survivor.status()["restarts"]["total"] == len(survivor.recoveries)


def _cut_network(pod_uid):
    """Take a pod's interface down, in its network namespace."""
    mark = f"POD_UID={pod_uid}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if mark in variables:
            cut = ["nsenter", "--target", process.name, "--net", "ip", "link", "set", "eth0", "down"]
            subprocess.run(cut, check=True)
            return
    raise LookupError(f"no process has the variables of pod uid {pod_uid}")
