"""Objects of others beside the jobs, with names and labels like theirs, which the operator must leave as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from support.soak.differences import JOB, UID, Object
from support.soak.work import PATHS, Api


class Foreign:
    """A StatefulSet, a Service and a ConfigMap for each job: its name with another end, some with its labels."""

    def __init__(self, api: Api, jobs: Iterable[str]) -> None:
        self._api = api
        for job in jobs:
            labels = {JOB: job, UID: "of-nobody", "app.kubernetes.io/managed-by": "another-program"}
            pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "any"}]}}
            specs: dict[str, dict[str, Any]] = {
                "StatefulSet": {
                    "spec": {"replicas": 0, "serviceName": job, "selector": {"matchLabels": labels}, "template": pod}
                },
                "Service": {"spec": {"ports": [{"port": 80}], "selector": labels}},
                "ConfigMap": {"data": {"contract.json": "{}"}},
            }
            for kind, rest in specs.items():
                api("POST", PATHS[kind], {"metadata": {"name": f"{job}-theirs", "labels": labels}, **rest})
        self._before = self._read()

    def _read(self) -> dict[str, Object]:
        found = {}
        for kind in ("StatefulSet", "Service", "ConfigMap"):
            for one in (self._api("GET", PATHS[kind]) or {})["items"]:
                if one["metadata"]["name"].endswith("-theirs"):
                    meta = {key: value for key, value in one["metadata"].items() if key != "managedFields"}
                    meta.pop("resourceVersion" if kind == "StatefulSet" else "", None)  # its controller writes a status
                    found[f"{kind}/{meta['name']}"] = {**one, "metadata": meta, "status": None}
        return found

    def check(self) -> None:
        """Raises AssertionError if one of them changed or is gone."""
        assert self._read() == self._before
