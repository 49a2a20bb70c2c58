"""The watches of the operator: kinds, in namespaces."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from grpo_operator.api import names
from grpo_operator.runtime.errors import ObstacleError


@dataclass(slots=True)
class Scope:
    """The reach of one watch: a kind, in one namespace or in all.

    `version` is the newest that it has shown. `obstacle` says why the API server does not list an optional kind, until
    it does for the first time: jobs that need no object of this kind do not wait for it.
    """

    kind: str
    namespace: str | None
    version: int = -1  # no list yet
    obstacle: ObstacleError | None = None

    @property
    def is_listed(self) -> bool:
        """Whether there was a list."""
        return self.version >= 0

    def covers(self, namespace: str) -> bool:
        """Whether objects in this namespace belong to it."""
        return self.namespace in (None, namespace)


def scopes(namespaces: Iterable[str], kinds: Iterable[str] = names.WATCHED_KINDS) -> list[Scope]:
    """Return what to watch: these kinds in each of these namespaces, in all of them if there are none."""
    return [Scope(kind, namespace) for kind in kinds for namespace in (*namespaces,) or (None,)]


def site_kinds(namespaces: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of what a site sets for the jobs of these namespaces: an operator of some reads none that belong
    to the cluster.
    """
    return tuple(kind for kind in names.DEFAULTS_KINDS if not namespaces or "{}" in names.PATHS[kind])
