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
from grpo_cli.launcher import Launchers
from grpo_cli.pod_http import PodError
from grpo_cli.pods_view import ranks_of, running_pods
from grpo_cli.ui.source import Shown, SourceError
from grpo_cli.view import StatusError, read_status, read_topology
from grpo_operator.observe import read_pod

_GONE = "the pod of rank 0 does not run: curves lie on the volume, where `grpo ui --folder` shows them"


class ClusterSource:
    """A GRPOJob."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.shown = Shown(title=f"{kube.namespace}/{name}", where="cluster")
        self._asker, self._launchers = Asker(kube, name), Launchers(kube)

    def refresh(self) -> None:
        """See `Source.refresh`."""
        try:
            job, pods, view = self._asker.look()
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
        if topology is None or topology.members[0].pod not in running_pods(pods):
            self.shown.note = self.shown.note or ("" if read_status(job).epoch is None else _GONE)
            return
        try:
            is_anew, told = self._launchers.history(topology.members[0], {}, after=self.shown.history.last_step)
        except PodError as error:
            self.shown.note = str(error)
            return
        if is_anew:
            self.shown.history.clear()
        self.shown.history.add(told)


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
