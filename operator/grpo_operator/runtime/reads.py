"""The operator's reads from the API server. Objects are plain dicts."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.api import names
from grpo_operator.runtime.transport import Object, Transport

_PATHS = names.PATHS | {"Event": "/apis/events.k8s.io/v1/namespaces/{}/events"}

WATCH_SECONDS = 540
"""Seconds after which the API server ends a watch; the next one continues where it ended."""


class Reads:
    """Reads from one API server. Methods raise what `Transport` raises."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._send = transport, transport.request
        self._paths = dict(_PATHS)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def serves(self, kind: str) -> bool:
        """Whether the API server serves a kind of an API group; if so, it is used in that version from then on."""
        for paths in (_PATHS, names.OLDER_PATHS):
            if kind in paths and await self._has(kind, names.api_version(kind, paths)):
                self._paths[kind] = paths[kind]
                return True
        return False

    async def _has(self, kind: str, api_version: str) -> bool:
        try:
            found = await self._send("get", "APIResourceList", f"/apis/{api_version}")
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        return any(one["kind"] == kind for one in found["resources"])

    async def openapi(self) -> Object:
        """Return the OpenAPI v3 document of our API group; empty while the API server does not serve it."""
        try:
            return await self._send("get", "OpenAPI", f"/openapi/v3/apis/{names.API_VERSION}")
        except ApiException as error:
            if error.status == 404:
                return {}
            raise

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self._send("get", kind, self._path(kind, namespace, name))
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    async def node(self, name: str) -> Object | None:
        """Return a node, or None if it does not exist."""
        return await self.get("Node", "", name)

    async def events(self, namespace: str, which: str) -> list[Object]:
        """Return the events of a field selector. The API server reads all events of the namespace for it."""
        return list((await self._send("list", "Event", self._path("Event", namespace), field_selector=which))["items"])

    async def list(self, kind: str, namespace: str, label_selector: str) -> list[Object]:
        """Return the objects of a kind that match the labels, with `apiVersion` and `kind`, which list items lack."""
        answer = await self._send("list", kind, self._path(kind, namespace), label_selector=label_selector)
        return [item | {"apiVersion": answer["apiVersion"], "kind": kind} for item in answer["items"]]

    async def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """Do what `get` does with a list, for which the operator has the right where it watches."""
        answer = await self._send("list", kind, self._path(kind, namespace), field_selector=f"metadata.name={name}")
        return next((item | {"apiVersion": answer["apiVersion"], "kind": kind} for item in answer["items"]), None)

    async def page(self, kind: str, namespace: str | None, selector: str, limit: int, token: str) -> Object:
        """Return a part of a consistent list, of all namespaces if `namespace` is None.

        `token` is `metadata.continue` of the part before, "" for the first one. Items lack `apiVersion` and `kind`.
        """
        query = [("labelSelector", selector), ("limit", str(limit)), *([("continue", token)] if token else [])]
        return await self._send("list", kind, self._scope(kind, namespace), query_params=query)

    def watch(self, kind: str, namespace: str | None, selector: str, version: str) -> AsyncIterator[Object]:
        """Yield the watch events ({type, object}) after a resourceVersion, with bookmarks, until the server ends it."""
        query = {
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            "watch": "true",
        }
        return self._transport.stream(self._scope(kind, namespace), list(query.items()))

    def _path(self, kind: str, namespace: str, name: str | None = None) -> str:
        return self._paths[kind].format(namespace) + (f"/{name}" if name else "")

    def _scope(self, kind: str, namespace: str | None) -> str:
        return self._paths[kind].replace("/namespaces/{}", "" if namespace is None else f"/namespaces/{namespace}")
