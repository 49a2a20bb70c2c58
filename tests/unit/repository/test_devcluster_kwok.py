"""Fake nodes make a pod ready twice without a change that watches would show."""

from grpo_devcluster.kwok import idempotent

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
