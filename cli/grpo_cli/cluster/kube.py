"""Requests of the command line to one API server; objects are plain dicts."""

from __future__ import annotations

import http
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient

from grpo_cli.errors import CliError, Exit, no_crd, no_job
from grpo_operator.api import names

Object = dict[str, Any]

FIELD_MANAGER = "grpo-cli"
"""Field manager of server-side apply; it differs from the operator's, so that the two never overwrite each other."""
SECONDS = (5.0, 30.0)
"""Time limits: to connect, and to wait for an answer."""
_PATHS = names.PATHS | {
    "Event": "/api/v1/namespaces/{}/events",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
}
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> Kube:
    """Return the cluster that kubectl would talk to.

    That is the one of `kubeconfig`, else of KUBECONFIG, else of ~/.kube/config, else the one that this pod runs in.
    Raises ConfigException.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    configuration = client.Configuration()
    inside = (
        kubeconfig is None and context is None and SERVICE_ACCOUNT.exists() and not Path(path).expanduser().exists()
    )
    if inside:
        config.load_incluster_config(configuration)
        own = SERVICE_ACCOUNT.read_text().strip()
    else:
        config.load_kube_config(path, context, client_configuration=configuration, persist_config=False)
        contexts, current = config.list_kube_config_contexts(path)
        chosen = next((each for each in contexts if each["name"] == context), current)
        own = chosen["context"].get("namespace") or "default"
    # Wait as long as a busy API server asks for (429, 503); report one that cannot be reached at once.
    configuration.retries = urllib3.Retry(total=3, connect=0, read=0, redirect=0, raise_on_status=False)
    return Kube(client.ApiClient(configuration), namespace or own, is_asked_for=namespace is not None)


class Kube:
    """One API server and the namespace of a command; `is_asked_for`: --namespace named it, not the context.

    Requests are made by path: the client's generated classes take more than a second to import.
    """

    def __init__(self, api: client.ApiClient, namespace: str, *, is_asked_for: bool = False) -> None:
        self.api, self.namespace, self.is_asked_for = api, namespace, is_asked_for
        self._dynamic = DynamicClient(api, discoverer=lambda *_: None)

    def job(self, name: str) -> Object:
        """Return a job. Raises CliError naming similar jobs, or for a cluster without GRPOJobs; ApiException."""
        try:
            return self._get(f"{self._path(names.KIND)}/{name}")
        except ApiException as error:
            if error.status != 404:
                raise
            there = [job["metadata"]["name"] for job in self.jobs()]
            raise no_job(name, self.namespace, there, lambda: self._namespaces_of(name)) from error

    def jobs(self, *, everywhere: bool = False) -> list[Object]:
        """Return the jobs of the namespace, or of all. Raises CliError for a cluster without GRPOJobs; ApiException."""
        try:
            return self.listed_everywhere(names.KIND) if everywhere else self.listed(names.KIND)
        except ApiException as error:
            raise (no_crd() if error.status == 404 else error) from error

    def apply(self, document: Object, *, force: bool) -> bool:
        """Apply an object on the server, which refuses unknown fields; return whether it is new.

        It goes to this namespace unless it names another one. Raises CliError when the cluster has no such kind;
        ApiException.
        """
        name, own = document["metadata"]["name"], document["metadata"].get("namespace") or self.namespace
        try:
            answer = self._request(
                "patch",
                f"{self._path_of(document).format(own)}/{name}",
                body=document,
                content_type="application/apply-patch+yaml",
                query={"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "force": str(force).lower()},
            )
        except ApiException as error:
            missing = document["kind"] == names.KIND and error.status == 404 and "page not found" in str(error.body)
            raise (no_crd() if missing else error) from error
        return answer.status == http.HTTPStatus.CREATED

    def _path_of(self, document: Object) -> str:
        """Return the path of an object's kind, with a place for the namespace."""
        kind, version = document["kind"], document["apiVersion"]
        if kind == names.KIND:
            return _PATHS[kind]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        try:
            served = self._get(root)["resources"]
        except ApiException as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            served = []
        for resource in served:
            if resource["kind"] == kind and "/" not in resource["name"]:
                return f"{root}/{'namespaces/{}/' if resource['namespaced'] else ''}{resource['name']}"
        raise CliError(f"this cluster has no {kind} of {version}", Exit.NOT_FOUND)

    def suspend_job(self, name: str, suspend: bool) -> None:
        """Set `spec.suspend`."""
        self._request(
            "patch",
            f"{self._path(names.KIND)}/{name}",
            body={"spec": {"suspend": suspend}},
            content_type="application/merge-patch+json",
            query={"fieldManager": FIELD_MANAGER},
        )

    def pods(self, job: Object) -> list[Object]:
        """Return the job's pods, sorted by name."""
        selector = f"{names.LABEL_JOB}={job['metadata']['name']},{names.LABEL_JOB_UID}={job['metadata']['uid']}"
        return sorted(self.listed("Pod", selector), key=lambda pod: str(pod["metadata"]["name"]))

    def listed(self, kind: str, selector: str = "") -> list[Object]:
        """Return objects of a kind in the namespace, by label; each has its `kind`, which items of a list lack."""
        query, older = {"labelSelector": selector}, names.OLDER_PATHS.get(kind)
        try:
            found = self._get(self._path(kind), query)
        except ApiException as error:
            if older is None or error.status != http.HTTPStatus.NOT_FOUND:
                raise
            found = self._get(older.format(self.namespace), query)
        return [item | {"kind": kind} for item in found["items"]]

    def listed_everywhere(self, kind: str, selector: str = "") -> list[Object]:
        """Return objects of a kind in all namespaces, or of the cluster, by label."""
        path = _PATHS[kind].replace("/namespaces/{}", "")
        return [item | {"kind": kind} for item in self._get(path, {"labelSelector": selector})["items"]]

    def named(self, kind: str, name: str) -> Object:
        """Return an object of the namespace. Raises ApiException."""
        return self._get(f"{self._path(kind)}/{name}")

    def create(self, kind: str, manifest: Object) -> Object:
        """Create an object in the namespace; return it. Raises ApiException."""
        return cast(Object, json.loads(self._request("post", self._path(kind), body=manifest).data))

    def delete(self, kind: str, name: str) -> None:
        """Delete an object of the namespace, if it is still there. Raises ApiException."""
        try:
            self._request("delete", f"{self._path(kind)}/{name}")
        except ApiException as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise

    def version(self) -> str:
        """Return the API server's version."""
        return str(self._get("/version")["gitVersion"])

    def log(
        self,
        pod: str,
        *,
        container: str = names.CONTAINER,
        namespace: str | None = None,
        follow: bool = False,
        previous: bool = False,
        timestamps: bool = False,
        tail_lines: int | None = None,
        limit_bytes: int | None = None,
    ) -> urllib3.HTTPResponse:
        """Return a container's log as a stream of bytes."""
        path = f"{_PATHS['Pod'].format(namespace or self.namespace)}/{pod}/log"
        flags = {"follow": follow, "previous": previous, "timestamps": timestamps}
        limits = {"tailLines": tail_lines, "limitBytes": limit_bytes}
        query = {"container": container} | {name: "true" for name, wanted in flags.items() if wanted}
        query |= {name: str(limit) for name, limit in limits.items() if limit is not None}
        # A log that is followed can be silent for hours.
        return self._request("get", path, query=query, seconds=(SECONDS[0], None) if follow else SECONDS)

    def _namespaces_of(self, name: str) -> Iterator[str]:
        try:
            everywhere = self.jobs(everywhere=True)
        except ApiException as error:
            if error.status == 403:  # this person may read one namespace only
                return
            raise
        yield from (job["metadata"]["namespace"] for job in everywhere if job["metadata"]["name"] == name)

    def _path(self, kind: str) -> str:
        return _PATHS[kind].format(self.namespace)

    def _get(self, path: str, query: dict[str, str] | None = None) -> Object:
        return cast(Object, json.loads(self._request("get", path, query=query).data))

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str | None = None,
        seconds: tuple[float, float | None] = SECONDS,
    ) -> urllib3.HTTPResponse:
        asked = list((query or {}).items())
        answer = self._dynamic.request(
            method,
            path,
            body,
            serialize=False,
            query_params=asked,
            header_params={},
            content_type=content_type,
            _request_timeout=seconds,
        )
        return cast(urllib3.HTTPResponse, answer)
