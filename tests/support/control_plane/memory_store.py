"""The store of an API server: objects with growing resourceVersions, and their history until it is compacted."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
Place = tuple[str, str, str]
"""Kind, namespace and name of an object."""


@dataclass(frozen=True)
class Change:
    """One write: the object before and after it, None if there was or is none."""

    version: int
    kind: str
    before: Object | None
    after: Object | None


@dataclass(frozen=True)
class Selection:
    """The selection of a list or a watch: a kind, in one namespace or in all, with these labels."""

    kind: str
    namespace: str | None = None
    labels: tuple[tuple[str, str], ...] = ()

    def has(self, raw: Object | None) -> bool:
        """Whether an object of the kind is asked for."""
        if raw is None or self.namespace not in (None, raw["metadata"]["namespace"]):
            return False
        labels = raw["metadata"].get("labels", {})
        return all(labels.get(name) == value for name, value in self.labels)

    def event(self, change: Change) -> Object | None:
        """Return the watch event about a change; an object that leaves the selection is told as deleted."""
        if change.kind != self.kind:
            return None
        before, after = self.has(change.before), self.has(change.after)
        if not (before or after):
            return None
        if after:
            return {"type": "MODIFIED" if before else "ADDED", "object": change.after}
        assert change.before is not None
        return {"type": "DELETED", "object": _at(change.before, change.version)}


def disturb(events: list[Object], at: int, how: str) -> None:
    """Lose, repeat or exchange one of the events that are under way, of which there is one at least."""
    first, second = at % len(events), (at + 1) % len(events)
    if how == "lose":
        del events[first]
    elif how == "repeat":
        events.insert(second, events[first])
    else:
        events[first], events[second] = events[second], events[first]


class Store:
    """Objects are never changed in place. `time` returns the time of now as a timestamp."""

    def __init__(self, time: Callable[[], str] = lambda: "2026-01-01T00:00:00Z") -> None:
        self.time = time
        self.version, self.compacted = 100, 100
        self.objects: dict[Place, Object] = {}
        self.changes: list[Change] = []
        self.listeners: list[Callable[[Change], None]] = []
        self._uids = itertools.count(1)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object."""
        return self.objects.get((kind, namespace, name))

    def select(self, selection: Selection) -> list[Object]:
        """Return all objects that are asked for, by namespace and name."""
        return [
            self.objects[place]
            for place in sorted(self.objects)
            if place[0] == selection.kind and selection.has(self.objects[place])
        ]

    def put(self, raw: Mapping[str, Any]) -> Object:
        """Create or replace an object and return it, with the metadata that the server keeps. An update that changes
        nothing is no write.
        """
        given = raw["metadata"]
        place = raw["kind"], given.get("namespace", ""), given["name"]
        old = self.objects.get(place)
        if old is None:
            kept = {"uid": f"uid-{next(self._uids)}", "creationTimestamp": self.time(), "generation": 1}
        else:
            kept = {name: old["metadata"][name] for name in ("uid", "creationTimestamp", "generation")}
            kept["generation"] += raw.get("spec") != old.get("spec")
            unchanged = {**raw, "metadata": {**given, **kept, "resourceVersion": old["metadata"]["resourceVersion"]}}
            if unchanged == old:
                return old
        self.version += 1
        new = {**raw, "metadata": {**given, "namespace": place[1], **kept, "resourceVersion": str(self.version)}}
        self._change(place, new)
        return new

    def edit(self, raw: Object, **changes: Any) -> Object:
        """Replace top-level fields of an object; `metadata` and `status` are merged with what there is."""
        merged = {
            name: {**raw.get(name, {}), **changes.pop(name)} for name in ("metadata", "status") if name in changes
        }
        return self.put({**raw, **merged, **changes})

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Remove an object."""
        self.version += 1
        self._change((kind, namespace, name), None)

    def compact(self) -> None:
        """Forget the history: lists in pages and watches from an older version get 410."""
        self.compacted = self.version
        self.changes.clear()

    def events(self, selection: Selection, after: int) -> Iterator[Object]:
        """Yield the watch events after a version."""
        for change in self.changes:
            if change.version > after and (event := selection.event(change)) is not None:
                yield event

    def _change(self, place: Place, new: Object | None) -> None:
        change = Change(self.version, place[0], self.objects.get(place), new)
        if new is None:
            del self.objects[place]
        else:
            self.objects[place] = new
        self.changes.append(change)
        for listener in [*self.listeners]:
            listener(change)


def _at(raw: Object, version: int) -> Object:
    return {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(version)}}
