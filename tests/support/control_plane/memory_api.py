"""An API server in memory, below the operator's real `Cluster`: the requests that it sends, and watches to disturb.

As a test wants, a watch delivers late, ends, breaks, expires, and loses, repeats or reorders events. Server-side apply
is that of an applier who owns all fields: it replaces `spec` and `data`, and merges labels and owner references.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.api import names
from grpo_operator.decide.objects import was_applied
from support.control_plane.memory_store import Change, Object, Selection, Store

_KINDS = {path.rpartition("/")[2]: kind for kind, path in names.PATHS.items()}
END = object()


def failure(status: int, message: str) -> ApiException:
    """Return the API server's answer to a request that fails."""
    error = ApiException(status=status, reason=message)
    error.body, error.headers = json.dumps({"message": message}), {}
    return error


@dataclass(frozen=True)
class Request:
    """A request. `name` is "" for lists and new events."""

    verb: str
    kind: str
    namespace: str | None
    name: str
    params: dict[str, Any] = field(default_factory=dict, compare=False)


class Stream:
    """A watch that is open. Events wait in `pending` while its kind is held, in `sent` until the client reads them."""

    def __init__(self, store: Store, selection: Selection, version: int, held: set[str]) -> None:
        self.selection, self._held = selection, held
        self.pending, self.sent = list(store.events(selection, version)), list[Any]()
        self.history: list[Object] = []
        self._woken = asyncio.Event()

    def changed(self, change: Change) -> None:
        """Take in a change of the store."""
        if (event := self.selection.event(change)) is not None:
            self.pending.append(event)
            self._woken.set()

    def bookmark(self, version: int) -> None:
        """Tell the version of now."""
        metadata = {"resourceVersion": str(version)}
        self.pending.append({"type": "BOOKMARK", "object": {"kind": self.selection.kind, "metadata": metadata}})
        self._woken.set()

    def let_through(self, count: int | None = None) -> None:
        """Send so many events, or all."""
        count = len(self.pending) if count is None else count
        self.sent += self.pending[:count]
        del self.pending[:count]
        self._woken.set()

    def stop(self, how: Any) -> None:
        """End the watch after what is sent: `END`, an exception, or an event such as an error."""
        self.sent.append(how)
        self._woken.set()

    async def read(self) -> Any:
        """Return the next event, END or an exception."""
        while True:
            if self.selection.kind not in self._held:
                self.let_through()
            if self.sent:
                event = self.sent.pop(0)
                if isinstance(event, dict):
                    self.history.append(event)
                return event
            self._woken.clear()
            await self._woken.wait()


class MemoryApi:
    """Takes the place of `Transport`. Tests replace `before` and `after`, which surround each request's effect."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.requests: list[Request] = []
        self.streams: list[Stream] = []
        self.held_kinds: set[str] = set()
        self.events: list[Object] = []
        self._lists: dict[str, tuple[int, list[Object]]] = {}

    async def before(self, request: Request) -> None:
        """Return once the request has reached the server; raise if it does not."""

    async def after(self, request: Request) -> None:
        """Return once the answer has come; raise if it is lost."""

    async def close(self) -> None:
        """Close nothing."""

    async def request(self, verb: str, kind: str, path: str, **params: Any) -> Object:
        """See Transport."""
        namespace, name = _address(path)
        request = Request(verb, kind, namespace, name or _name_in(params.get("body")), params)
        self.requests.append(request)
        await self.before(request)
        try:
            answer: Object = getattr(self, "_" + verb.replace("-", "_"))(request)
        finally:
            await self.after(request)
        return answer

    async def stream(self, path: str, query: list[tuple[str, str]]) -> AsyncIterator[Object]:
        """See Transport."""
        asked = dict(query)
        selection = Selection(_KINDS[path.rpartition("/")[2]], _address(path)[0], _labels(asked["labelSelector"]))
        request = Request("watch", selection.kind, selection.namespace, "", asked)
        self.requests.append(request)
        await self.before(request)
        version = int(asked["resourceVersion"])
        if version < self.store.compacted:
            raise failure(410, f"too old resource version: {version}")
        stream = Stream(self.store, selection, version, self.held_kinds)
        self.streams.append(stream)
        self.store.listeners.append(stream.changed)
        try:
            while (event := await stream.read()) is not END:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.streams.remove(stream)
            self.store.listeners.remove(stream.changed)

    # Verbs

    def _get(self, request: Request) -> Object:
        return self._existing(request)

    def _list(self, request: Request) -> Object:
        query = dict(request.params.get("query_params", ()))
        if (token := query.get("continue")) is not None:
            version, rest = self._lists.pop(token)
            if version < self.store.compacted:
                raise failure(410, "the continue parameter is too old")
        else:
            labels = _labels(query.get("labelSelector", request.params.get("label_selector", "")))
            version, rest = self.store.version, self.store.select(Selection(request.kind, request.namespace, labels))
            if (only := request.params.get("field_selector")) is not None:
                rest = [raw for raw in rest if only == f"metadata.name={raw['metadata']['name']}"]
        limit = int(query.get("limit", len(rest)))
        metadata = {"resourceVersion": str(version)}
        if rest[limit:]:
            metadata["continue"] = token = f"{version}/{len(self.requests)}"
            self._lists[token] = version, rest[limit:]
        items = [{name: raw[name] for name in raw if name not in ("kind", "apiVersion")} for raw in rest[:limit]]
        return {"kind": f"{request.kind}List", "apiVersion": "v1", "metadata": metadata, "items": items}

    def _create(self, request: Request) -> Object:
        manifest = dict(request.params["body"])
        if request.kind == "Event":
            self.events.append(manifest)
            return manifest
        fields = [{"manager": names.MANAGER, "operation": "Update"}]
        return self.store.put(
            {**self._dry_create(request), "metadata": {**manifest["metadata"], "managedFields": fields}}
        )

    def _update(self, request: Request) -> Object:
        old, new = self._existing(request), request.params["body"]
        if new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]:
            raise failure(409, "the object has been modified")
        return self.store.put({**old, "status": new["status"]})

    def _scale(self, request: Request) -> Object:
        old, patch = self._existing(request), request.params["body"]
        self._check_preconditions(old, patch["metadata"])
        return self.store.put({**old, "spec": {**old["spec"], **patch["spec"]}})

    def _patch(self, request: Request) -> Object:
        old, metadata = self._existing(request), request.params["body"]["metadata"]
        self._check_preconditions(old, metadata)
        changed = {"annotations", "labels"} & metadata.keys()
        return self.store.edit(old, metadata={n: old["metadata"].get(n, {}) | metadata[n] for n in changed})

    _relabel = _patch

    def _patch_fields(self, request: Request) -> Object:
        old = self._existing(request)
        entries = [dict(entry) for entry in old["metadata"]["managedFields"]]
        for step in request.params["body"]:
            *_, first, last = step["path"].split("/")
            place = old["metadata"] if first == "metadata" else entries[int(first)]
            if step["op"] == "test" and place[last] != step["value"]:
                raise failure(422, "testing value failed")
            if step["op"] == "replace":
                place[last] = step["value"]
        return self.store.edit(old, metadata={"managedFields": entries})

    def _delete(self, request: Request) -> Object:
        old, options = self._existing(request), request.params["body"]
        self._check_preconditions(old, options["preconditions"])
        if old["metadata"].get("finalizers"):
            self.store.edit(old, metadata={"deletionTimestamp": self.store.time()})
        elif request.kind != "Pod" or options.get("gracePeriodSeconds") == 0 or not old["spec"].get("nodeName"):
            self.store.remove(request.kind, request.namespace or "", request.name)
        elif "deletionTimestamp" not in old["metadata"]:
            self.store.edit(old, metadata={"deletionTimestamp": self.store.time()})
        return old

    def _dry_create(self, request: Request) -> Object:
        if self.store.get(request.kind, request.namespace or "", request.name) is not None:
            raise failure(409, f"{request.kind} {request.name} already exists")
        return dict(request.params["body"])

    def _apply(self, request: Request) -> Object:
        return self.store.put(self._dry_apply(request))

    def _dry_apply(self, request: Request) -> Object:
        """Return an object with a manifest applied to it."""
        manifest = request.params["body"]
        old = self.store.get(request.kind, request.namespace or "", request.name)
        metadata = manifest["metadata"]
        if old is None:
            if "uid" in metadata:
                raise failure(409, "there is no such object")
            return dict(manifest)
        self._check_preconditions(old, metadata)
        had = old["metadata"]
        if request.verb == "apply" and not was_applied(old):
            raise AssertionError("an apply would not remove what only the creation set")
        owners = {one["uid"]: one for one in (*had.get("ownerReferences", ()), *metadata["ownerReferences"])}
        if sum(one.get("controller", False) for one in owners.values()) > 1:
            raise failure(422, "Only one reference can have Controller set to true")
        if old.get("immutable") and (old["data"], True) != (manifest["data"], manifest.get("immutable")):
            raise failure(422, "field is immutable when `immutable` is set")
        if request.kind == "StatefulSet" and old["spec"]["selector"] != manifest["spec"]["selector"]:
            raise failure(422, "updates to statefulset spec for fields other than 'replicas' are forbidden")
        labels = had.get("labels", {}) | metadata["labels"]
        return {**old, **manifest, "metadata": {**had, "labels": labels, "ownerReferences": [*owners.values()]}}

    def _existing(self, request: Request) -> Object:
        found = self.store.get(request.kind, request.namespace or "", request.name)
        if found is None:
            raise failure(404, f"{request.kind} {request.name} not found")
        return found

    def _check_preconditions(self, old: Object, wanted: Object) -> None:
        for name in ("uid", "resourceVersion"):
            if wanted.get(name, old["metadata"][name]) != old["metadata"][name]:
                raise failure(409, f"the object has another {name}")


def _address(path: str) -> tuple[str | None, str]:
    """Return the namespace, None for all, and the name in a path."""
    _, namespaced, rest = path.partition("/namespaces/")
    if namespaced:
        namespace, _, *names_ = rest.split("/")
        return namespace, names_[0] if names_ else ""
    kind, _, name = path.removeprefix("/api/v1/").partition("/")
    return ("", name) if kind == "nodes" else (None, "")


def _name_in(body: Any) -> str:
    return str(body.get("metadata", {}).get("name", "")) if isinstance(body, dict) else ""


def _labels(selector: str) -> tuple[tuple[str, str], ...]:
    pairs = [one.partition("=") for one in selector.split(",") if one]
    return tuple((name, value) for name, _, value in pairs)
