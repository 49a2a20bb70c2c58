"""The API server, and where its objects of a soak are."""

from __future__ import annotations

import json
import time

import urllib3

from grpo_devcluster.controlplane import ControlPlane
from support.soak.differences import Object

NAMESPACE = "soak"
PATHS = {
    "GRPOJob": f"/apis/training.grpo.dev/v1alpha1/namespaces/{NAMESPACE}/grpojobs",
    "Pod": f"/api/v1/namespaces/{NAMESPACE}/pods",
    "StatefulSet": f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets",
    "Service": f"/api/v1/namespaces/{NAMESPACE}/services",
    "ConfigMap": f"/api/v1/namespaces/{NAMESPACE}/configmaps",
    "NetworkPolicy": f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies",
}
PATIENCE_SECONDS = 120
"""Seconds that a request is repeated while the API server is away."""


class Api:
    """The API server with the rights of an administrator, through its restarts."""

    def __init__(self, plane: ControlPlane) -> None:
        self._server, token = plane.endpoints.server, plane.pki.token("admin")
        self._pool = urllib3.PoolManager(
            ca_certs=str(plane.pki.ca), headers={"Authorization": f"Bearer {token}"}, retries=False, timeout=10
        )

    def __call__(self, method: str, path: str, body: Object | None = None, kind: str = "json") -> Object | None:
        """Return the answer; None if the object does not exist, is another one by now, or exists already."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = self._pool.request(
                    method,
                    self._server + path,
                    body=None if body is None else json.dumps(body),
                    headers={**self._pool.headers, "Content-Type": f"application/{kind}"},
                )
                said, status = answer.data, answer.status
            except urllib3.exceptions.HTTPError as error:
                said, status = str(error).encode(), 503
            if status < 300:
                found: Object = json.loads(said)
                return found
            is_object = said.startswith(b"{")  # a path that is not served yet has an answer in plain text
            if status in (404, 409) and is_object:
                return None
            if (status not in (404, 429) and status < 500) or time.monotonic() > deadline:
                raise RuntimeError(f"{method} {path}: {status} {said.decode()}")
            time.sleep(0.2)

    def merge(self, path: str, body: Object) -> Object | None:
        """Merge a patch into an object."""
        return self("PATCH", path, body, "merge-patch+json")
