"""`spec.environmentPods`: pods in which the job's tools and environments run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from grpo_operator.api.pod_template import GroupSpec, list_map
from grpo_spec.generation import Topology
from grpo_spec.schema import Name, Rule, Section


class EnvironmentPodGroup(GroupSpec):
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

    def serving(self, environment: str | None) -> tuple[EnvironmentPodGroup, ...]:
        """Return the groups that serve an environment; all for None, as all serve tools."""
        return tuple(g for g in self.groups if not (environment and g.environments) or environment in g.environments)


_SERVES = "!has(g.environments) || size(g.environments) == 0"
_LATER = "self.training.maxStaleness * self.training.promptsPerStep * self.training.numGenerations"
_SERVED = "(has(self.environments) && size(self.environments) > 0 ? self.environments.map(e, e.name) : [''])"


def _later(s: Any) -> int:
    """Return how many episodes of later steps may be open while their rank trains."""
    if s.generation.topology is not Topology.COLOCATE:
        return 0
    return int(s.training.max_staleness * s.training.prompts_per_step * s.training.num_generations)


def _has_room(s: Any) -> bool:
    """Whether they leave each environment a session: a rank waits for one while others keep theirs until it trains."""
    if s.environment_pods is None or not (later := _later(s)):
        return True
    names = [one.name for one in s.environments] or [None]
    return all(sum(g.replicas * g.sessions for g in s.environment_pods.serving(name)) > later for name in names)


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
        lambda s: s.environment_pods is None or all(map(s.environment_pods.serving, (e.name for e in s.environments))),
    ),
    Rule(
        "!has(self.environmentPods) || self.generation.topology != 'Colocate' || self.training.maxStaleness == 0 || "
        f"{_SERVED}.all(n, self.environmentPods.groups.filter(g, n == '' || {_SERVES} || g.environments.exists(m, "
        f"m == n)).map(g, g.replicas * g.sessions).sum() > {_LATER})",
        "environmentPods needs more sessions for training.maxStaleness with generation.topology Colocate: episodes of "
        "later steps (maxStaleness x promptsPerStep x numGenerations) keep theirs while their rank trains, and ranks "
        "would wait for each other; raise replicas or sessions, or lower maxStaleness: replicas x sessions, of all "
        "groups that serve an environment together, must exceed that number",
        _has_room,
        lambda s: _later(s) + 1,
        f"{_LATER} + 1",
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
