"""Fake nodes make a pod ready twice without a change that watches would show."""

from typing import Any

from grpo_devcluster.kwok import idempotent, node
from grpo_operator.api.pod_requests import PodRequests

STAGES = """
metadata: {name: node-initialize}
next: {statusTemplate: "{{ $now := Now }}"}
---
metadata:
  name: pod-ready
next: {statusTemplate: "{{ $now := Now }} {{ $now }}"}
"""


def test_pods_become_ready_as_of_their_creation_and_nodes_as_of_now() -> None:
    node, pod = idempotent(STAGES).split("---")
    assert "$now := Now " in node
    assert "$now := .metadata.creationTimestamp }} {{ $now }}" in pod
    assert "Now " not in pod


def test_a_node_has_room_for_pods_that_take_all_its_gpus() -> None:
    status: Any = node(0, 250)["status"]
    found, each = status["allocatable"], PodRequests()
    assert (each.cpu_per_gpu, each.memory_per_gpu) == ("1", "4Gi")
    assert int(found["cpu"]) >= 250
    assert int(found["memory"].removesuffix("Gi")) >= 4 * 250
