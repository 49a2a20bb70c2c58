"""Gangs where one more feature gate is on: the scheduler finds a rack for all pods, and takes nodes from a gang only
for one that then fits whole."""

from collections.abc import Iterator
from typing import Any

import pytest

from grpo_devcluster import kube
from grpo_devcluster.controlplane import ControlPlane
from support.control_plane.fake_nodes import set_priorities
from support.control_plane.operators import Jobs, Operator, install_chart, make_job

pytestmark = pytest.mark.newer

GATES = ("GenericWorkload", "TopologyAwareWorkloadScheduling")
FEATURES: dict[str, Any] = {
    "feature_gates": dict.fromkeys(GATES, True),
    "runtime_config": {"scheduling.k8s.io/v1beta1": True},
}
RACKS = {"kwok-000": "empty", "kwok-001": "pair", "kwok-002": "pair"}


@pytest.fixture
def jobs(tmp_path: Any) -> Iterator[Jobs]:
    """A cluster with a rack of one node and one of two, and an operator in it."""
    with ControlPlane(tmp_path / "plane", kwok_nodes=3, audit=False, **FEATURES) as plane:

        def kubectl(*args: str, stdin: str | None = None) -> str:
            return kube.kubectl(plane.kubeconfig, *args, stdin=stdin)

        for node, rack in RACKS.items():
            kubectl("label", "node", node, f"rack={rack}")
        set_priorities(kubectl, goes_first=1000)
        release = install_chart(plane, kubectl)
        operator = Operator(release.kubeconfig, plane.state / "logs" / "operator.log", release.arguments)
        operator.start()
        yield Jobs(kubectl, "default")
        operator.kill()


def _spec(pods: int, **more: Any) -> dict[str, Any]:
    groups = [{"name": "a", "replicas": pods, "gpus": 8}]
    return {"trainer": {"groups": groups}, "training": {"promptsPerStep": 8 * pods}} | more


def test_a_gang_is_placed_in_one_rack_and_leaves_whole_for_one_that_fits_whole(jobs: Jobs) -> None:
    # Each pod takes so much of a small node that the scheduler would rather take the large one, in the rack of one.
    large = '{"status": {"allocatable": {"cpu": "960"}}}'
    jobs("patch", "node", "kwok-000", "--subresource=status", "--type=merge", "-p", large)
    resources = {"podTemplate": {"resources": {"requests": {"cpu": "48"}}}}
    near = {"gang": "Native", "topologyKey": "rack", "topologyPolicy": "Required"}
    jobs.run("near", **_spec(2, scheduling=near, **resources))
    assert jobs.nodes("near") == ["kwok-001", "kwok-002"]

    first = {"podTemplate": {"priorityClassName": "goes-first"}, "scheduling": {"gang": "Native"}}
    jobs.apply(make_job("never", **_spec(4, **first)))
    jobs.wait_for("never", "Scheduled", "False", "Unschedulable")
    jobs.run("takes", **_spec(2, **first))
    status = jobs.status("near")
    assert (status["lastFailure"]["reason"], status["restarts"]) == ("Preempted", {"total": 1, "counted": 0})
    jobs.wait_for("near", "Scheduled", "False", "Unschedulable")
    assert [jobs.nodes(name) for name in ("near", "never")] == [[], []]
