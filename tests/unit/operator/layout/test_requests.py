"""Requests of pods for cpu and memory: by GPUs, and only where their settings say nothing about it."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_operator.api.pod_requests import PodRequests, times
from grpo_operator.layout.job import Job, Queue
from grpo_operator.layout.queueing import workload
from grpo_operator.layout.topology import plan_topology
from support.control_plane.jobs import job, pod_specs


def _made(**changes: Any) -> Job:
    return replace(job(**changes), requests=PodRequests())


def _of_group(resources: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the resources of one group of 8 GPUs."""
    groups = {"groups": [{"name": "a", "gpus": 8, "podTemplate": {"resources": resources or {}}}]}
    return pod_specs(_made(trainer=groups, **changes))["a"]["containers"][0]["resources"]


def test_pods_request_cpu_and_memory_by_their_gpus_and_have_no_limit_of_it() -> None:
    assert _of_group() == {
        "limits": {"nvidia.com/gpu": "8"},
        "requests": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "8"},
    }
    claimed = _made(trainer={"groups": [{"name": "a", "gpus": 2, "resourceClaimTemplateName": "two"}]})
    assert pod_specs(claimed)["a"]["containers"][0]["resources"] == {
        "claims": [{"name": "gpus"}],
        "requests": {"cpu": "2", "memory": "8Gi"},
    }
    assert _of_group(device={"type": "cpu"}) == {"requests": {"cpu": "100m", "memory": "256Mi"}}


@pytest.mark.parametrize(
    ("said", "requests"),
    [
        ({"requests": {"memory": "1200Gi"}}, {"cpu": "8", "memory": "1200Gi"}),
        ({"limits": {"memory": "2Gi"}}, {"cpu": "8"}),
        ({"limits": {"cpu": "4", "memory": "2Gi"}}, {}),
        ({"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}}, {"cpu": "1"}),
    ],
)
def test_what_a_pod_template_says_of_a_resource_by_request_or_limit_stands(
    said: dict[str, Any], requests: dict[str, str]
) -> None:
    assert _of_group(said)["requests"] == requests | {"nvidia.com/gpu": "8"}
    assert _of_group(podTemplate={"resources": said})["requests"] == requests | {"nvidia.com/gpu": "8"}


def test_kueue_is_asked_for_them_too() -> None:
    made = replace(_made(), queue=Queue("team"))
    sets = workload(made, plan_topology(made))["spec"]["podSets"]
    asked = [one["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"] for one in sets]
    assert asked == ["8Gi", "4Gi"]


@pytest.mark.parametrize(
    ("quantity", "number", "product"),
    [("500m", 8, "4"), ("500m", 3, "1500m"), ("256Mi", 4, "1Gi"), ("4Gi", 64, "256Gi"), ("3", 2, "6"), ("", 2, "")],
)
def test_quantities_are_written_as_the_api_server_writes_them(quantity: str, number: int, product: str) -> None:
    """Else an operator that starts would apply every StatefulSet once."""
    assert times(quantity, number) == product
