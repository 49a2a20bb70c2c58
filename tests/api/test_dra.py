"""Devices by dynamic resource allocation: the scheduler allocates what a ResourceClaimTemplate asks for."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from support.control_plane.fake_nodes import fake_nodes
from support.control_plane.operators import Jobs, make_job

pytestmark = pytest.mark.newer

DRIVER = "gpu.example.com"
NODES = {"kwok-320": "large", "kwok-321": "small"}
TEMPLATE = {"nodeSelector": {"only": "dra"}}


@pytest.fixture
def nodes(kubectl: Any) -> Iterator[None]:
    """Two nodes on which a driver publishes 4 devices each, of two kinds, and the class of these devices."""
    made = []
    for name, kind in NODES.items():
        devices = [{"name": f"gpu-{index}", "attributes": {"kind": {"string": kind}}} for index in range(4)]
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": devices}
        made.append(_of_group("ResourceSlice", name, spec))
    selectors = [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]
    made.append(_of_group("DeviceClass", DRIVER, {"selectors": selectors}))
    with fake_nodes(kubectl, "dra", (320, 321), gpus=0):
        kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(made))
        yield
    kubectl("delete", "-f", "-", "--wait=false", stdin=yaml.safe_dump_all(made))


def _of_group(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def _claims_of(jobs: Jobs, name: str, count: int, kind: str) -> None:
    """Create a ResourceClaimTemplate for so many devices of a kind."""
    selectors = [{"cel": {"expression": f"device.attributes['{DRIVER}'].kind == '{kind}'"}}]
    exactly = {"deviceClassName": DRIVER, "count": count, "selectors": selectors}
    devices = {"requests": [{"name": "gpus", "exactly": exactly}]}
    jobs.apply(_of_group("ResourceClaimTemplate", name, {"spec": {"devices": devices}}))


def test_each_group_gets_the_devices_of_its_template_and_the_next_job_waits_for_them(jobs: Jobs, nodes: None) -> None:
    _claims_of(jobs, "three-large", 3, "large")
    _claims_of(jobs, "two-small", 2, "small")
    groups = [
        {"name": "a", "gpus": 3, "resourceClaimTemplateName": "three-large"},
        {"name": "b", "gpus": 2, "resourceClaimTemplateName": "two-small"},
    ]
    spec = {"trainer": {"groups": groups}, "training": {"promptsPerStep": 5}, "podTemplate": TEMPLATE}
    jobs.run("first", **spec)
    allocated: dict[str, list[str]] = {}
    for claim in jobs.list("resourceclaims"):
        pod = claim["status"]["reservedFor"][0]["name"]
        allocated[pod] = [one["pool"] for one in claim["status"]["allocation"]["devices"]["results"]]
    assert allocated == {"first-a-0": ["kwok-320"] * 3, "first-b-0": ["kwok-321"] * 2}
    container = jobs.get("pod", "first-a-0")["spec"]["containers"][0]
    resources = {"claims": [{"name": "gpus"}], "requests": {"cpu": "3", "memory": "12Gi"}}
    assert container["resources"] == resources, "no extended resource"

    jobs.apply(make_job("second", **spec))
    message = jobs.wait_for("second", "Scheduled", "False", "Unschedulable")["message"]
    assert "cannot allocate all claims" in message
    jobs.succeed("first-a-0", "first-b-0")
    jobs.wait_for("second", "Running", "True")


def test_a_template_that_is_missing_is_named_until_it_is_there(jobs: Jobs, nodes: None) -> None:
    groups = [{"name": "a", "gpus": 1, "resourceClaimTemplateName": "absent"}]
    jobs.apply(make_job("alone", trainer={"groups": groups}, podTemplate=TEMPLATE))
    message = jobs.wait_for("alone", "Accepted", "False", "ClaimNotFound")["message"]
    assert "has no ResourceClaimTemplate absent; create it" in message
    _claims_of(jobs, "absent", 1, "small")
    jobs.wait_for("alone", "Running", "True")
