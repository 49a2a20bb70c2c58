"""The operator's reads from the API server and writes to it. Objects are plain dicts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import aiohttp
from kubernetes.aio.client.exceptions import ApiException

from grpo_operator.api import names
from grpo_operator.runtime.complaints import Complaints
from grpo_operator.runtime.errors import (
    ConflictError,
    Expected,
    ForbiddenError,
    LeftoverError,
    expected,
    reason_of,
    refusal,
)
from grpo_operator.runtime.ownership import check_owner, noted_as_applied
from grpo_operator.runtime.transport import Object, Transport
from grpo_spec.lenient import clip

log = logging.getLogger(__name__)

_PATHS = names.PATHS | {"Event": "/apis/events.k8s.io/v1/namespaces/{}/events"}
_MERGE, _JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"

WATCH_SECONDS = 540
"""Seconds after which the API server ends a watch; the next one continues where it ended."""


class Cluster:
    """Reads from and writes to one API server. Methods raise what `Transport` raises."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._send = transport, transport.request
        self._paths = dict(_PATHS)
        self._complaints = Complaints(log)

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

    async def events(self, namespace: str, reason: str) -> list[Object]:
        """Return the events of a reason. The API server reads all events of the namespace for it."""
        about = f"reason={reason}"
        return list((await self._send("list", "Event", self._path("Event", namespace), field_selector=about))["items"])

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

    async def create(self, manifest: Object) -> Object:
        """Do what `find_or_create` does, and return the object alone."""
        return (await self.find_or_create(manifest))[0]

    async def find_or_create(self, manifest: Object) -> tuple[Object, bool]:
        """Create an object; return it, and whether it is new. If the job has it already, return it as it is.

        Raises ForeignError if the name belongs to somebody else, and RefusedError if the API server refuses the object
        permanently.
        """
        return await self._create("create", manifest)

    async def apply(self, manifest: Object, uid: str, *, was_applied: bool) -> Object:
        """Apply the manifest server-side under our field manager to the job's object with this UID. Return the object
        as it is then.

        `was_applied`: whether it is known that this is not the first time. Raises ConflictError if there is no such
        object any more, and RefusedError if the API server refuses the manifest permanently.
        """
        metadata = manifest["metadata"]
        try:
            if not was_applied and (live := await self.check_owner(manifest)) and (steps := noted_as_applied(live)):
                path = self._path(manifest["kind"], metadata["namespace"], metadata["name"])
                await self._send("patch-fields", manifest["kind"], path, body=steps, content_type=_JSON_PATCH)
            return await self._apply("apply", manifest | {"metadata": metadata | {"uid": uid}})
        except ApiException as error:
            # 409: there is another object of this name, or none. 422: what a JSON patch tests has changed.
            if error.status in (404, 409, 422):
                raise ConflictError(reason_of(error)) from error
            raise

    async def try_apply(self, manifest: Object, *, is_ours: bool) -> None:
        """Create or apply the manifest without effect. Raises what `create` and `apply` raise.

        `is_ours`: the job is known to have an object of this name.
        """
        if is_ours or not (await self._create("dry-create", manifest, dryRun="All"))[1]:
            await self._apply("dry-apply", manifest, dry_run="All")

    async def check_owner(self, manifest: Object) -> Object | None:
        """Return the object of the manifest's name if it exists. Raises ForeignError if it has another controller or
        none.

        What an earlier job of the name left, and no pass has seen since others took its labels away, is deleted;
        LeftoverError says so.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        live = await self.find(kind, namespace, name)
        if live is None:
            return None
        try:
            check_owner(manifest, live)
        except LeftoverError as error:
            (owner,) = metadata["ownerReferences"]
            job = await self.get(names.KIND, namespace, owner["name"])
            if error.uid and job is not None and job["metadata"]["uid"] == owner["uid"]:  # else it may be a later job's
                await self.delete(kind, namespace, name, error.uid)
            raise
        return live | {"apiVersion": manifest["apiVersion"]}

    async def _create(self, verb: str, manifest: Object, **query: str) -> tuple[Object, bool]:
        path = self._path(manifest["kind"], manifest["metadata"]["namespace"])
        # Without Strict, the API server leaves out a field that it does not know.
        params = {"fieldManager": names.MANAGER, "fieldValidation": "Strict", **query}
        try:
            return await self._offer(verb, manifest, path, query_params=[*params.items()]), True
        except ApiException as error:
            if error.status != 409 or (live := await self.check_owner(manifest)) is None:
                raise
        return live, False

    async def _apply(self, verb: str, manifest: Object, **params: str) -> Object:
        metadata = manifest["metadata"]
        return await self._offer(
            verb,
            manifest,
            self._path(manifest["kind"], metadata["namespace"], metadata["name"]),
            content_type="application/apply-patch+yaml",
            field_manager=names.MANAGER,
            force_conflicts="true",
            **params,
        )

    async def _offer(self, verb: str, manifest: Object, path: str, **params: Any) -> Object:
        """Send a manifest and return the answer. Raises RefusedError if the API server refuses it permanently."""
        kind = manifest["kind"]
        if self._paths[kind] == names.OLDER_PATHS.get(kind):
            manifest = _of_an_older_version(manifest)
        try:
            return await self._send(verb, kind, path, body=manifest, **params)
        except ApiException as error:
            if (refused := refusal(error, kind, manifest["metadata"]["name"])) is not None:
                raise refused from error
            raise

    async def stop_statefulset(self, namespace: str, name: str, uid: str) -> Object | None:
        """Set the replicas of the StatefulSet with this UID to 0, and change nothing else. Return it as it is then, or
        None if it no longer exists.
        """
        path, body = self._path("StatefulSet", namespace, name), {"metadata": {"uid": uid}, "spec": {"replicas": 0}}
        return await self._change_if_there("scale", "StatefulSet", path, body)

    async def announce(self, namespace: str, name: str, uid: str, attempt: int | None) -> None:
        """Write an attempt into an annotation of the pod with this UID, if it still exists: its kubelet looks at it."""
        metadata = {"uid": uid, "annotations": {names.ANNOTATION_ATTEMPT: str(attempt)}}
        await self._change_if_there("patch", "Pod", self._path("Pod", namespace, name), {"metadata": metadata})

    async def relabel(self, manifest: Object, uid: str) -> Object | None:
        """Give the object with this UID the manifest's labels again, and change nothing else. Return it as it is then,
        or None if it no longer exists.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        path = self._path(kind, metadata["namespace"], metadata["name"])
        body = {"metadata": {"uid": uid, "labels": metadata["labels"]}}
        return await self._change_if_there("relabel", kind, path, body)

    async def _change_if_there(self, verb: str, kind: str, path: str, body: Object) -> Object | None:
        """Merge `body`, which has the object's UID, into an object. Return it, or None if it no longer exists."""
        try:
            return await self._send(verb, kind, path, body=body, content_type=_MERGE, field_manager=names.MANAGER)
        except ApiException as error:
            if error.status in (404, 409):  # gone, or another object by now
                return None
            raise

    async def scale(self, job: Object, replicas: int) -> None:
        """Set the number of a job's elastic engines in its spec. Raises ConflictError if the job changed since."""
        body = {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"]}, "spec": {"replicas": replicas}}
        await self._change_job("scale", job, "/scale", body=body, content_type=_MERGE)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, *, force: bool = False) -> None:
        """Delete the object with this UID, if it still exists. `force`: do not wait for the pod's kubelet."""
        options: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if force:
            options["gracePeriodSeconds"] = 0
        try:
            await self._send("delete", kind, self._path(kind, namespace, name), body=options)
        except ApiException as error:
            if error.status not in (404, 409):  # gone, or another object by now
                raise

    async def patch_status(self, kind: str, metadata: Object, status: Object) -> Object:
        """Set fields in the status of an object as it was read. Raises ConflictError if it changed since."""
        read = {"resourceVersion": metadata["resourceVersion"], "uid": metadata["uid"]}
        path = self._path(kind, metadata.get("namespace", ""), metadata["name"]) + "/status"
        body = {"metadata": read, "status": status}
        try:
            return await self._send(
                "patch-status", kind, path, body=body, content_type=_MERGE, field_manager=names.MANAGER
            )
        except ApiException as error:
            if error.status in (404, 409):
                raise ConflictError(reason_of(error)) from error
            raise

    async def write_status(self, job: Object, status: Object) -> Object:
        """Replace the status of a job as it was read, and return the job. Raises ConflictError if it changed since."""
        metadata = {name: job["metadata"][name] for name in ("namespace", "name", "uid", "resourceVersion")}
        # The API server takes all but the status from the stored object.
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "status": status}
        return await self._change_job("update", job, "/status", body=body)

    async def _change_job(self, verb: str, job: Object, subresource: str, **params: Any) -> Object:
        """Change a job as it was read, and return the answer. Raises ConflictError if it changed since."""
        path = self._path(names.KIND, job["metadata"]["namespace"], job["metadata"]["name"]) + subresource
        try:
            return await self._send(verb, names.KIND, path, field_manager=names.MANAGER, **params)
        except ApiException as error:
            if error.status in (404, 409):
                raise ConflictError(reason_of(error)) from error
            raise

    async def emit(self, about: Object, *, kind: str, reason: str, message: str, now: datetime) -> None:
        """Create an event about a job, or what a site sets. A failure is only logged: the status says the same."""
        metadata = about["metadata"]
        regarding = {
            "apiVersion": names.API_VERSION,
            "kind": about.get("kind", names.KIND),
            **{name: metadata[name] for name in ("name", "namespace") if name in metadata},
        }
        namespace = metadata.get("namespace", "default")  # where Kubernetes has events about objects of the cluster
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}-", "namespace": namespace},
            "eventTime": now.isoformat(timespec="microseconds"),
            "action": "Reconcile",
            "reason": reason,
            "note": clip(message, 1024),  # the API server's limit, in bytes
            "type": kind,
            "regarding": regarding | {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
            "reportingController": f"{names.GROUP}/{names.MANAGER}",
            "reportingInstance": names.MANAGER,
        }
        try:
            await self._send("create", "Event", self._path("Event", namespace), body=event)
        except (ApiException, ForbiddenError, aiohttp.ClientError, OSError) as error:
            known = expected(error) or Expected(str(error), str(error))
            where = namespace, metadata["name"]
            self._complaints.say(known.subject, "%s/%s: the event %s was not written: %s", *where, reason, known.text)

    def _path(self, kind: str, namespace: str, name: str | None = None) -> str:
        return self._paths[kind].format(namespace) + (f"/{name}" if name else "")

    def _scope(self, kind: str, namespace: str | None) -> str:
        return self._paths[kind].replace("/namespaces/{}", "" if namespace is None else f"/namespaces/{namespace}")


def _of_an_older_version(pod_group: Object) -> Object:
    """Return a PodGroup as Kubernetes 1.36 has it."""
    version = names.api_version(names.GANG_KIND, names.OLDER_PATHS)
    return pod_group | {"apiVersion": version, "spec": pod_group["spec"] | {"disruptionMode": "PodGroup"}}
