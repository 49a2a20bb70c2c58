"""`spec.environmentPods`: pods in which the job's tools and environments run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_operator.api.pod_template import PodGroup, list_map
from grpo_spec.schema import Name, Rule, Section


class EnvironmentPodGroup(PodGroup):
    """Environment pods of one kind."""

    RULES = (
        Rule(
            "!self.podTemplate.hostNetwork && !self.podTemplate.privileged",
            "podTemplate of environment pods must not set hostNetwork or privileged: they run what the model asks for, "
            "and a NetworkPolicy guards them; leave both out",
            lambda g: not (g.pod_template.host_network or g.pod_template.privileged),
        ),
    )

    sessions: int = Field(
        64,
        ge=1,
        le=65_536,
        description="Most sessions open at a time on one pod; each is one episode with a process of its own. Lower it "
        "where sessions need much memory.",
    )
    environments: tuple[Name, ...] = Field(
        (),
        max_length=32,
        description="Names of those of spec.environments that this group serves; default: all. Every group also "
        "serves all tools. Set it where environments need different pods.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )


class EnvironmentPodsSpec(Section):
    """Pods in which tools and environments run."""

    groups: Annotated[tuple[EnvironmentPodGroup, ...], Field(min_length=1, max_length=16)] = Field(
        description="Groups of environment pods. Groups may differ in what they serve and in pod settings.",
        json_schema_extra=list_map("name"),
    )

    def serves(self, environment: str) -> bool:
        """Whether a group serves this environment."""
        return any(not group.environments or environment in group.environments for group in self.groups)


_SERVES = "!has(g.environments) || size(g.environments) == 0"

ENVIRONMENT_POD_RULES = (
    Rule(
        "!has(self.environmentPods) || has(self.tools) && size(self.tools) > 0 || "
        "has(self.environments) && size(self.environments) > 0",
        "environmentPods needs tools or environments, which run there",
        lambda s: s.environment_pods is None or s.has_episodes,
    ),
    Rule(
        "!has(self.environmentPods) || self.environmentPods.groups.all(g, !has(g.environments) || "
        "g.environments.all(n, has(self.environments) && self.environments.exists(e, e.name == n)))",
        "environmentPods.groups[].environments must be names of environments",
        lambda s: (
            s.environment_pods is None
            or {name for g in s.environment_pods.groups for name in g.environments} <= {e.name for e in s.environments}
        ),
    ),
    Rule(
        "!has(self.environmentPods) || !has(self.environments) || self.environments.all(e, "
        f"self.environmentPods.groups.exists(g, {_SERVES} || g.environments.exists(n, n == e.name)))",
        "each of environments must be served by a group of environmentPods: name it in environments of one, or leave "
        "that out, which means all",
        lambda s: s.environment_pods is None or all(s.environment_pods.serves(e.name) for e in s.environments),
    ),
    Rule(
        "!has(self.environmentPods) || !has(self.environments) || self.environments.all(e, !has(e.program))",
        "environmentPods do not go with environments[].program: a program runs beside its rank, whose gateway it asks",
        lambda s: s.environment_pods is None or len(s.factories) == len(s.environments),
    ),
    Rule(
        "!has(self.environmentPods) || self.environmentPods.groups.all(g, "
        "self.trainer.groups.all(t, t.name != g.name) && (!has(self.generation.server) || "
        "self.generation.server.groups.all(t, t.name != g.name)))",
        "groups of environmentPods must have other names than those of trainer and generation.server: each becomes a "
        "StatefulSet",
        lambda s: s.environment_pods is None or len({g.name for g in s.pod_groups}) == len(s.pod_groups),
    ),
)
"""Rules of the whole spec: what goes with environment pods."""
