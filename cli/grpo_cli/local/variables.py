"""The variables that users give their pods, for processes of this machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_operator.api.names import Role
from grpo_operator.layout.pods import pod_settings
from grpo_operator.layout.topology import Job, Topology


@dataclass(frozen=True, slots=True)
class Variables:
    """Variables of a job's pods."""

    by_pod: dict[str, dict[str, str]]  # those whose values the manifest has
    elsewhere: tuple[str, ...]  # names of those that only a cluster knows, each once; `envFrom` for whole sources


def variables(job: Job, topology: Topology) -> Variables:
    """Return the variables of each pod: those of its group's podTemplate over those of the job's.

    Here tools and environments run beside each rank, so trainer pods also get the variables of environment pods.
    """
    by_pod: dict[str, dict[str, str]] = {}
    elsewhere: dict[str, None] = {}
    beside: dict[str, str] = {}
    for group in (*topology.environment_groups, *topology.groups):
        template = pod_settings(job, group)
        values = {one.name: one.value or "" for one in template.env if one.value_from is None}
        if group.role is Role.ENVIRONMENT:
            beside |= values
        else:
            by_pod |= dict.fromkeys(group.pods, beside | values if group.role is Role.TRAINER else values)
        elsewhere |= dict.fromkeys(one.name for one in template.env if one.value_from is not None)
        elsewhere |= dict.fromkeys(["envFrom"] if template.env_from else [])
    return Variables(by_pod, tuple(elsewhere))
