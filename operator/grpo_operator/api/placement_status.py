"""The parts of the status about where an attempt's pods run: placement, nodes to avoid, and Kueue's admission."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_operator.api.pod_template import LabelMap, Objects, TextMap
from grpo_operator.api.status_section import StatusSection
from grpo_operator.api.times import Time


class AvoidedNode(StatusSection):
    """A node that new pods avoid if another one is free: it was lost, or pods failed on it again."""

    name: str = Field(max_length=253, description="Name of the node.")
    until: Time = Field(description="Attempts that begin after this time no longer avoid the node.")


class FailedNode(StatusSection):
    """A node on which attempts or engines failed since the job last made progress."""

    name: str = Field(max_length=253, description="Name of the node.")
    failures: int = Field(description="Number of failures there; from two on, new pods avoid the node.")


class PlacementStatus(StatusSection):
    """Number of the attempt's pods with a node, while others have none."""

    placed: int = Field(description="Number of pods that have a node; the largest so far in this attempt.")
    since: Time = Field(description="Time when this number was reached; scheduling.timeoutSeconds counts from it.")


class PlacementTimeouts(StatusSection):
    """Attempts in a row that ended because only some of their pods found a node."""

    total: int = Field(description="Number of these attempts; the wait before the next attempt doubles with each.")
    since: Time = Field(description="Time when the first of them began; startupDeadlineSeconds counts from it.")


class GroupAdmission(StatusSection):
    """Settings that Kueue's admission adds to a group's pods."""

    name: str = Field(max_length=63, description="Name of the group.")
    node_selector: LabelMap = Field(default_factory=dict, description="Labels of the nodes of the resource flavors.")
    tolerations: Objects = Field((), description="Tolerations of the resource flavors.")
    labels: LabelMap = Field(default_factory=dict, description="Labels by which Kueue finds the pods.")
    annotations: TextMap = Field(default_factory=dict, description="Annotations by which Kueue finds the pods.")
    gated: bool = Field(
        False, description="Whether the pods wait until Kueue has chosen a place for each (topology-aware scheduling)."
    )


class Admission(StatusSection):
    """Kueue's admission that the current attempt runs with."""

    workload: str = Field(max_length=253, description="Name of the Workload.")
    uid: str = Field(max_length=64, description="UID of the Workload.")
    cluster_queue: str = Field(max_length=253, description="ClusterQueue whose quota the attempt uses.")
    groups: Annotated[tuple[GroupAdmission, ...], Field(max_length=64)] = Field(
        (), description="Settings that the admission adds to each group."
    )
