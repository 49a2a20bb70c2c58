"""Fake nodes of one test, to which no other test's pods go, and priorities of its pods."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml

from grpo_devcluster import kwok


@contextmanager
def fake_nodes(
    kubectl: Any, only: str, numbers: Sequence[int], *, gpus: int = 8, racks: int = 1, kept: Sequence[int] = ()
) -> Iterator[list[str]]:
    """Yield the names of nodes with the label `only`, which take turns in racks; a taint keeps pods from the `kept`."""
    nodes: list[Any] = [kwok.node(number, gpus) for number in numbers]
    for number, node in zip(numbers, nodes, strict=True):
        node["metadata"]["labels"] |= {"only": only, "rack": f"rack-{number % racks}"}
        if number in kept:
            node["spec"] = {"taints": [{"key": "kept", "effect": "NoSchedule"}]}
    names = [node["metadata"]["name"] for node in nodes]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(nodes))
    try:
        yield names
    finally:
        kubectl("delete", "node", *names, "--wait=false")


def set_priorities(kubectl: Any, **values: int) -> None:
    """Make sure that there are PriorityClasses of these names; `_` stands for `-`."""
    kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
    made = [kind | {"metadata": {"name": name.replace("_", "-")}, "value": value} for name, value in values.items()]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(made))
