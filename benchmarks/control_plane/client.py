"""Requests to the API server over kept connections, with little work on this side: it shares the processors."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import urllib3
import yaml

from grpo_operator.api import names

Manifest = dict[str, Any]

PATHS = names.PATHS | {
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    "LeaderWorkerSet": "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{}/leaderworkersets",
}
AT_ONCE = 16
"""Requests under way at once, whatever is created."""

ADMIN = "admin"
"""The benchmark's own name in the audit log."""

JSON = "application/json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class Api:
    """The API server, with the rights of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._server, self._headers = cluster["server"], {"Authorization": f"Bearer {user['token']}"}
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._connections = urllib3.PoolManager(maxsize=2 * AT_ONCE, ca_cert_data=authority)

    def request(self, method: str, path: str, body: Manifest | None = None, kind: str = JSON) -> Manifest:
        """Send a request and return the answer's object. Raises RuntimeError with the API server's message."""
        answer = self._connections.request(
            method,
            self._server + path,
            body=None if body is None else json.dumps(body).encode(),
            headers=self._headers | {"Content-Type": kind},
            timeout=60,
        )
        found: Manifest = json.loads(answer.data)
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {found.get('message', '')}")
        return found

    def create(self, namespace: str, objects: list[Manifest]) -> None:
        """Create objects, one after the other."""
        for one in objects:
            self.request("POST", PATHS[one["kind"]].format(namespace), one)

    def create_all(self, namespace: str, jobs: list[list[Manifest]]) -> None:
        """Create the objects of jobs, `AT_ONCE` jobs at once."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda objects: self.create(namespace, objects), jobs))

    def patch(self, namespace: str, kind: str, name: str, change: Manifest, *, subresource: str = "") -> Manifest:
        """Change an object by a strategic merge patch if it is a pod, else by a merge patch."""
        form = STRATEGIC if kind == "Pod" else MERGE
        return self.request("PATCH", f"{PATHS[kind].format(namespace)}/{name}{subresource}", change, form)

    def items(self, namespace: str, kind: str) -> list[Manifest]:
        """Return the objects of a kind."""
        found: list[Manifest] = self.request("GET", PATHS[kind].format(namespace) + "?resourceVersion=0")["items"]
        return found

    def exists(self, path: str) -> bool:
        """Return whether there is an object at a path."""
        return self._connections.request("GET", self._server + path, headers=self._headers, timeout=60).status == 200

    def watch(self, namespace: str, kind: str) -> Stream:
        """Open a watch of a kind; its first events are the objects that exist."""
        url = f"{self._server}{PATHS[kind].format(namespace)}?watch=true"
        return Stream(self._connections.request("GET", url, headers=self._headers, preload_content=False))


class Stream:
    """The objects that a watch shows, until one side ends it; the API server does if it finds the reader slow."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response

    def __iter__(self) -> Iterator[Manifest]:
        for line in self._response:
            event = json.loads(line)
            if event["type"] == "ERROR":
                return
            yield event["object"]

    def close(self) -> None:
        """End the iteration, which another thread runs."""
        self._response.shutdown()
