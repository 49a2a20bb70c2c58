"""The operator's writes to the API server, beside its reads. Objects are plain dicts."""

from __future__ import annotations

import logging
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
from grpo_operator.runtime.event import make_event
from grpo_operator.runtime.ownership import check_owner, noted_as_applied
from grpo_operator.runtime.reads import Reads
from grpo_operator.runtime.transport import Object, Transport

log = logging.getLogger(__name__)

_MERGE, _JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"


class Cluster(Reads):
    """Reads from and writes to one API server. Methods raise what `Transport` raises."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._complaints = Complaints(log)

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
        event = make_event(about, kind=kind, reason=reason, message=message, now=now)
        namespace = event["metadata"]["namespace"]
        try:
            await self._send("create", "Event", self._path("Event", namespace), body=event)
        except (ApiException, ForbiddenError, aiohttp.ClientError, OSError) as error:
            known = expected(error) or Expected(str(error), str(error))
            where = namespace, about["metadata"]["name"]
            self._complaints.say(known.subject, "%s/%s: the event %s was not written: %s", *where, reason, known.text)


def _of_an_older_version(pod_group: Object) -> Object:
    """Return a PodGroup as Kubernetes 1.36 has it."""
    version = names.api_version(names.GANG_KIND, names.OLDER_PATHS)
    return pod_group | {"apiVersion": version, "spec": pod_group["spec"] | {"disruptionMode": "PodGroup"}}
