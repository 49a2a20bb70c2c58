"""Reads from an API server without a process of kubectl for each: tests poll ten times a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kubernetes import client, config

from grpo_devcluster import kube

CORE, APPS, GRPO = "/api/v1", "/apis/apps/v1", "/apis/training.grpo.dev/v1alpha1"
KINDS = {
    "pod": (CORE, "pods"),
    "pods": (CORE, "pods"),
    "configmap": (CORE, "configmaps"),
    "service": (CORE, "services"),
    "event": (CORE, "events"),
    "events": (CORE, "events"),
    "statefulset": (APPS, "statefulsets"),
    "statefulsets": (APPS, "statefulsets"),
    "networkpolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "job": ("/apis/batch/v1", "jobs"),
    "grpo": (GRPO, "grpojobs"),
    "grpojob": (GRPO, "grpojobs"),
    "grpojobs": (GRPO, "grpojobs"),
}
"""API and plural of what tests poll, as they write it."""


class Kubectl:
    """`kubectl("get", "pods", stdin=...)` returns its output, or raises a RuntimeError with its message."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._api: client.ApiClient | None = None

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        if stdin is None and (found := self._read(args)) is not None:
            return found
        return kube.kubectl(self._kubeconfig, *args, stdin=stdin)

    def _read(self, args: Sequence[str]) -> str | None:
        """The answer to `-n NAMESPACE get KIND [NAME | -l SELECTOR] -o json`; None if kubectl has to give it."""
        match args:
            case ["-n", namespace, "get", kinds, "-o", "json"]:
                return self._list(namespace, kinds.split(","), "")
            case ["-n", namespace, "get", kinds, "-l", selector, "-o", "json"]:
                return self._list(namespace, kinds.split(","), selector)
            case ["-n", namespace, "get", kind, name, "-o", "json"] if kind in KINDS and not name.startswith("-"):
                found = self._get(kind, namespace, f"/{name}")
                return None if found is None else json.dumps(found)
        return None

    def _list(self, namespace: str, kinds: Sequence[str], selector: str) -> str | None:
        items = []
        for kind in kinds:
            if kind not in KINDS or (found := self._get(kind, namespace, "", labelSelector=selector)) is None:
                return None
            of_each = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
            items += [of_each | item for item in found["items"]]
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})

    def _get(self, kind: str, namespace: str, name: str, **query: str) -> Any:
        if self._api is None:
            self._api = config.new_client_from_config(str(self._kubeconfig))
        api, plural = KINDS[kind]
        path = f"{api}/namespaces/{namespace}/{plural}{name}"
        request = self._api.param_serialize("GET", path, query_params=[*query.items()], auth_settings=["BearerToken"])
        answer = self._api.call_api(*request)
        data = answer.read()
        return json.loads(data) if answer.status == 200 else None  # kubectl says it in the words that tests read
