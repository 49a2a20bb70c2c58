"""The only module that talks to the API server."""

from __future__ import annotations

import logging
from typing import Any

from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import DynamicApiError

from grpo_operator.api import names
from grpo_operator.edge.applied import Applied
from grpo_operator.edge.errors import (
    ConflictError,
    ForbiddenError,
    ForeignError,
    is_forbidden,
    reason_of,
    refusal,
)
from grpo_operator.metrics.instruments import Instruments
from grpo_workload.spec.lenient import clip

Object = dict[str, Any]
log = logging.getLogger(__name__)

_PATHS = names.PATHS | {"Event": "/apis/events.k8s.io/v1/namespaces/{}/events"}
_METHODS = {
    "get": "get",
    "list": "get",
    "create": "post",
    "apply": "patch",
    "dry-run": "patch",
    "scale": "patch",
    "update": "put",
    "delete": "delete",
}
"""HTTP method of each verb that metrics count; dry-run is an apply that changes nothing."""


async def configure() -> client.ApiClient:
    """Return a client for the cluster that this process runs in, else for the one in KUBECONFIG."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(configuration)
    except ConfigException:
        await config.load_kube_config(client_configuration=configuration)
    return client.ApiClient(configuration)


class Cluster:
    """Reads from and writes to one API server. Objects are plain dicts.

    Methods raise ForbiddenError if the operator's roles do not allow it, and ApiException if the API server fails.
    """

    def __init__(self, api: client.ApiClient, instruments: Instruments) -> None:
        self._dynamic = DynamicClient(api)
        self._api, self._instruments = api, instruments
        self._applied = Applied()

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def serves_jobs(self) -> bool:
        """Whether the API server serves GRPOJobs."""
        try:
            await self._request("get", "APIResourceList", f"/apis/{names.API_VERSION}")
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    async def openapi(self) -> Object:
        """Return the OpenAPI v3 document of our API group; empty while the API server does not serve it."""
        try:
            return await self._request("get", "OpenAPI", f"/openapi/v3/apis/{names.API_VERSION}")
        except ApiException as error:
            if error.status == 404:
                return {}
            raise

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self._request("get", kind, self._path(kind, namespace, name))
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    async def node(self, name: str) -> Object | None:
        """Return a node, or None if it does not exist."""
        return await self.get("Node", "", name)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, *, force: bool = False) -> None:
        """Delete the object with this UID, if it still exists. `force`: do not wait for the pod's kubelet."""
        options: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if force:
            options["gracePeriodSeconds"] = 0
        try:
            await self._request("delete", kind, self._path(kind, namespace, name), body=options)
        except ApiException as error:
            if error.status not in (404, 409):  # gone, or another object by now
                raise

    async def list(self, kind: str, namespace: str, label_selector: str) -> list[Object]:
        """Return the objects of a kind that match the labels, with `apiVersion` and `kind`, which list items lack."""
        answer = await self._request("list", kind, self._path(kind, namespace), label_selector=label_selector)
        return [item | {"apiVersion": answer["apiVersion"], "kind": kind} for item in answer["items"]]

    async def apply(self, manifest: Object, *, seen: Object | None = None, dry_run: bool = False) -> Object:
        """Apply the manifest server-side under our field manager, unless the object already is as wanted.

        `seen`: the object as just listed, which saves a read. Raises ForeignError if the object has another controller
        or none, and RefusedError if the API server refuses it permanently.
        """
        metadata = manifest["metadata"]
        live = seen or await self.get(manifest["kind"], metadata["namespace"], metadata["name"])
        if live is not None:
            _check_owner(manifest, live)
            # An immutable object stays as an earlier release wrote it: a running attempt keeps its contract.
            if live.get("immutable") or (not dry_run and self._applied.is_in_force(manifest, live)):
                return live
        try:
            answer = await self._request(
                "dry-run" if dry_run else "apply",
                manifest["kind"],
                self._path(manifest["kind"], metadata["namespace"], metadata["name"]),
                body=manifest,
                content_type="application/apply-patch+yaml",
                field_manager=names.MANAGER,
                force_conflicts="true",
                dry_run="All" if dry_run else None,
            )
        except ApiException as error:
            if (refused := refusal(error, manifest["kind"], metadata["name"])) is not None:
                raise refused from error
            raise
        if not dry_run:
            self._applied.remember(manifest, answer)
        return answer

    async def stop_statefulset(self, namespace: str, name: str, uid: str) -> None:
        """Set the replicas of the StatefulSet with this UID to 0, if it still exists, and change nothing else."""
        path, body = self._path("StatefulSet", namespace, name), {"metadata": {"uid": uid}, "spec": {"replicas": 0}}
        merge = "application/merge-patch+json"
        try:
            await self._request(
                "scale", "StatefulSet", path, body=body, content_type=merge, field_manager=names.MANAGER
            )
        except ApiException as error:
            if error.status not in (404, 409):  # gone, or another object by now
                raise

    async def write_status(self, job: Object, status: Object) -> Object:
        """Replace the status of a job as it was read. Raises ConflictError if the job has changed since."""
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": job["metadata"],
            "spec": job["spec"],
            "status": status,
        }
        path = self._path(names.KIND, job["metadata"]["namespace"], job["metadata"]["name"]) + "/status"
        try:
            return await self._request("update", names.KIND, path, body=body, field_manager=names.MANAGER)
        except ApiException as error:
            if error.status in (404, 409):
                raise ConflictError(reason_of(error)) from error
            raise

    async def emit(self, job: Object, *, kind: str, reason: str, message: str, now: str) -> None:
        """Create an event about a job. A failure is only logged: the status says the same."""
        metadata = job["metadata"]
        regarding = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
        }
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}-", "namespace": metadata["namespace"]},
            "eventTime": now.replace("Z", ".000000Z"),
            "action": "Reconcile",
            "reason": reason,
            "note": clip(message, 1024),  # the API server's limit, in bytes
            "type": kind,
            "regarding": regarding | {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
            "reportingController": f"{names.GROUP}/{names.MANAGER}",
            "reportingInstance": names.MANAGER,
        }
        try:
            await self._request("create", "Event", self._path("Event", metadata["namespace"]), body=event)
        except (ApiException, ForbiddenError) as error:
            said = reason_of(error) if isinstance(error, ApiException) else error
            log.warning(
                "%s/%s: the event %s was not written: %s", metadata["namespace"], metadata["name"], reason, said
            )

    @staticmethod
    def _path(kind: str, namespace: str, name: str | None = None) -> str:
        return _PATHS[kind].format(namespace) + (f"/{name}" if name else "")

    async def _request(self, verb: str, kind: str, path: str, **params: Any) -> Object:
        code = None
        try:
            answer = await self._dynamic.request(
                _METHODS[verb], path, serialize=False, query_params=[], header_params={}, **params
            )
            code = answer.status
        except DynamicApiError as error:
            code = error.status
            failed = ApiException(status=error.status, reason=error.reason, body=error.body)
            if is_forbidden(failed):
                raise ForbiddenError(verb, kind, path, reason_of(failed)) from error
            raise failed from error
        finally:
            self._instruments.requested(verb, kind, code)
        body = await answer.json()
        assert isinstance(body, dict)
        return body


def _check_owner(manifest: Object, live: Object) -> None:
    metadata = live["metadata"]
    wanted = manifest["metadata"]["ownerReferences"][0]["uid"]
    owner = next((ref for ref in metadata.get("ownerReferences", ()) if ref.get("controller")), None)
    if owner is not None and owner["uid"] == wanted:
        return
    holder = f"belongs to {owner['kind']} {owner['name']}" if owner else "has no owner"
    cure = "it is not adopted; delete it, or give the job another name"
    raise ForeignError(f"{manifest['kind']} {metadata['name']} already exists and {holder}: {cure}")
