"""The tools that a row's episode may call, as JSON schemas: chat templates show them to the model. It pickles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_spec.errors import ConfigError

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchemas:
    """Schemas of a job's tools: those of `tools`, which every row has, and those of each environment."""

    tools: Sequence[Schema] = ()
    environments: Mapping[str, Sequence[Schema]] = field(default_factory=dict)

    def of(self, columns: Mapping[str, Any]) -> list[Schema]:
        """Return the schemas of a row. ConfigError if its column `environment` names no environment of the job."""
        if not self.environments:
            return [*self.tools]
        if len(self.environments) == 1:
            (own,) = self.environments.values()
            return [*self.tools, *own]
        name = columns.get("environment")
        if not isinstance(name, str) or name not in self.environments:
            says = "does not say which environment it is for" if name is None else f"names {name!r}"
            raise ConfigError(f"its column `environment` {says}; there are {', '.join(self.environments)}")
        return [*self.tools, *self.environments[name]]

    def all(self) -> list[Schema]:
        """Return the schemas of all rows together."""
        return [*self.tools, *(schema for own in self.environments.values() for schema in own)]
