"""A mirror that follows an API server in memory, which fails as it is told."""

import asyncio
from collections.abc import Sequence
from typing import Self

from grpo_operator.metrics.instruments import Instruments
from grpo_operator.runtime.cluster import Cluster
from grpo_operator.runtime.kept import Key
from grpo_operator.runtime.mirror import Mirror
from grpo_operator.runtime.scopes import Scope
from grpo_operator.runtime.watches import Watches
from support.control_plane.children import truth
from support.control_plane.memory_api import MemoryApi, Request
from support.control_plane.memory_store import Store

KINDS = ("Pod", "ConfigMap")
KEYS = [Key("one", "a", "a-1"), Key("two", "a", "a-1"), Key("one", "b", "b-1")]
LAST_BACKOFF = 36.0
"""Seconds within which a failed list or watch is tried again."""


class FailingApi(MemoryApi):
    """An API server that fails, or that compacts its history between two pages, as often as it is told."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.failures: list[Exception] = []
        self.refused: dict[str, Exception] = {}  # by kind
        self.compactions = 0
        self.times: dict[str, list[float]] = {"list": [], "watch": []}

    async def before(self, request: Request) -> None:
        self.times[request.verb].append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)
        if request.kind in self.refused:
            raise self.refused[request.kind]
        if self.failures:
            raise self.failures.pop()
        if self.compactions and "continue" in dict(request.params.get("query_params", ())):
            self.compactions -= 1
            self.store.version += 1  # something else was written
            self.store.compact()


class FollowedServer:
    """A mirror that follows kinds of an API server, in all namespaces or in these."""

    def __init__(self, *kinds: str, namespaces: Sequence[str | None] = (None,)) -> None:
        self.store = Store()
        self.api = FailingApi(self.store)
        self.instruments = Instruments()
        self.woken: list[Key] = []
        scopes = [Scope(kind, namespace) for kind in kinds for namespace in namespaces]
        self.mirror = Mirror(scopes, self.woken.append, lambda *_: None, lambda *_: None, lambda _: None)
        self.watches = Watches(Cluster(self.api), self.mirror, self.instruments)  # type: ignore[arg-type]

    async def __aenter__(self) -> Self:
        self.watches.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.watches.close()

    def lists(self, reason: str) -> float:
        """Return how many lists were made for this reason."""
        name = "grpo_operator_mirror_lists_total"
        found = (self.instruments.registry.get_sample_value(name, {"kind": k, "reason": reason}) for k in KINDS)
        return sum(number or 0 for number in found)

    def differences(self) -> list[object]:
        """Return what the mirror shows and the server does not have, or the other way round."""
        found = []
        for key in KEYS:
            seen = sorted([*self.mirror.pods(key), *self.mirror.others(key)], key=repr)
            there = sorted(
                [one for kind in KINDS for one in truth(self.store, kind, key.namespace, key.name)], key=repr
            )
            found += [] if seen == there else [(key, seen, there)]
        return found
