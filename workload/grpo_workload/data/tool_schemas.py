"""The tools that a row's episode may call, as JSON schemas: chat templates show them to the model. It pickles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_spec.errors import ConfigError

Schema = dict[str, Any]
COLUMN = "environment"
"""Column of the dataset that chooses an environment where there are several."""


def environment_of(columns: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the environment of a row: the only one, or that in its column; None if that is none of `names`."""
    if len(names) == 1:
        return next(iter(names))
    name = columns.get(COLUMN)
    return name if isinstance(name, str) and name in names else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchemas:
    """Schemas of a job's tools: those of `tools`, which every row has, and those of each environment."""

    tools: Sequence[Schema] = ()
    environments: Mapping[str, Sequence[Schema]] = field(default_factory=dict)

    def of(self, columns: Mapping[str, Any]) -> list[Schema]:
        """Return the schemas of a row. ConfigError if its column `environment` names no environment of the job."""
        if not self.environments:
            return [*self.tools]
        if (name := environment_of(columns, self.environments)) is None:
            given = columns.get(COLUMN)
            says = "does not say which environment it is for" if given is None else f"names {given!r}"
            raise ConfigError(f"its column `{COLUMN}` {says}; there are {', '.join(self.environments)}")
        return [*self.tools, *self.environments[name]]

    def all(self) -> list[Schema]:
        """Return the schemas of all rows together."""
        return [*self.tools, *(schema for own in self.environments.values() for schema in own)]
