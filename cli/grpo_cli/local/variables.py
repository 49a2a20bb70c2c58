"""The variables that users give their pods, for processes of this machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_operator.layout.job import Job
from grpo_operator.layout.pods import pod_settings
from grpo_operator.layout.topology import Topology


@dataclass(frozen=True, slots=True)
class Variables:
    """Variables of a job's pods."""

    by_pod: dict[str, dict[str, str]]  # those whose values the manifest has
    elsewhere: tuple[str, ...]  # names of those that only a cluster knows, each once; `envFrom` for whole sources


def variables(job: Job, topology: Topology) -> Variables:
    """Return the variables of each pod: those of its group's podTemplate over those of the job's."""
    by_pod: dict[str, dict[str, str]] = {}
    elsewhere: dict[str, None] = {}
    for group in (*topology.groups, *topology.environment_groups):
        template = pod_settings(job, group)
        values = {one.name: one.value or "" for one in template.env if one.value_from is None}
        by_pod |= dict.fromkeys(group.pods, values)
        elsewhere |= dict.fromkeys(one.name for one in template.env if one.value_from is not None)
        elsewhere |= dict.fromkeys(["envFrom"] if template.env_from else [])
    return Variables(by_pod, tuple(elsewhere))
