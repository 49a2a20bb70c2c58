"""A job in a cluster as a source: the job, its pods and events from the API server, its curves from the launcher of rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import urllib3
from kubernetes.client.exceptions import ApiException
from pydantic_core import to_jsonable_python

from grpo_cli.asking import Asker
from grpo_cli.errors import explain
from grpo_cli.kube import Kube, Object
from grpo_cli.pod_http import PodError, get_json
from grpo_cli.pods_view import ranks_of
from grpo_cli.ui.source import Shown, SourceError
from grpo_cli.view import StatusError, read_status, read_topology
from grpo_operator.observe import read_pod

_GONE = "the pod of rank 0 does not run: curves lie on the volume, where `grpo ui --folder` shows them"


class ClusterSource:
    """A GRPOJob."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.shown = Shown(title=f"{kube.namespace}/{name}", where="cluster")
        self._kube, self._asker, self._name = kube, Asker(kube, name), name
        self._epoch: int | None = None

    def refresh(self) -> None:
        """See `Source.refresh`."""
        try:
            job, view = self._asker.look()
            pods = self._kube.pods(job)
        except click.ClickException as error:  # such as that there is no such job
            raise SourceError(error.message) from error
        except (ApiException, StatusError, urllib3.exceptions.HTTPError) as error:
            raise SourceError(explain(error).message) from error
        conditions = read_status(job).conditions
        self.shown.job = to_jsonable_python(view) | {
            "conditions": to_jsonable_python(conditions),
            "pods": _pods(job, pods),
        }
        self.shown.note = view.note
        self._read_history(job, pods)

    def _read_history(self, job: Object, pods: Sequence[Object]) -> None:
        topology = read_topology(job)
        master = topology.members[0].pod if topology else ""
        if not any(pod["metadata"]["name"] == master and pod.get("status", {}).get("phase") == "Running" for pod in pods):
            self.shown.note = self.shown.note or ("" if read_status(job).epoch is None else _GONE)
            return
        port = job["spec"].get("rendezvous", {}).get("statusPort", 29501)
        try:
            told = self._ask(master, port, self.shown.history.last_step)
            if self._epoch not in (None, told["epoch"]):
                self.shown.history.clear()
                told = self._ask(master, port, -1)
        except PodError as error:
            self.shown.note = str(error)
            return
        self._epoch = told["epoch"]
        self.shown.history.add(told)

    def _ask(self, pod: str, port: int, after: int) -> Any:
        return get_json(self._kube.api, self._kube.namespace, pod, port, f"/history?after={after}")


def _pods(job: Object, pods: Sequence[Object]) -> list[dict[str, Any]]:
    topology = read_topology(job)
    ranks = ranks_of(topology) if topology else {}
    told = []
    for pod in pods:
        seen, own = read_pod(pod), ranks.get(pod["metadata"]["name"], range(0))
        told.append(
            {
                "name": pod["metadata"]["name"],
                "node": pod["spec"].get("nodeName") or "",
                "phase": pod.get("status", {}).get("phase", ""),
                "ready": seen.ready,
                "waiting": seen.waiting or seen.unschedulable or "",
                "ranks": list(own),
            }
        )
    return told
