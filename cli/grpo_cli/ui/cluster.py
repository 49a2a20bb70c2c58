"""A job in a cluster as a source: job, pods and events from the API server, curves from rank 0's launcher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import urllib3
from kubernetes.client.exceptions import ApiException
from pydantic_core import to_jsonable_python

from grpo_cli.cluster.api_errors import explain
from grpo_cli.cluster.job_reader import JobReader
from grpo_cli.cluster.kube import Kube, Object
from grpo_cli.cluster.launchers import Launchers
from grpo_cli.cluster.pod_http import PodError
from grpo_cli.cluster.site import read_site
from grpo_cli.screen.pods import ranks_of
from grpo_cli.screen.view import read_job, read_topology, serving_master
from grpo_cli.ui.finished import may_have_curves
from grpo_cli.ui.folder import FolderSource
from grpo_cli.ui.source import Shown, SourceError
from grpo_operator.api.status import read_status
from grpo_operator.decide.observed_pod import read_pod
from grpo_spec.lenient import mapping

_GONE = "the pod of rank 0 does not run: begin `grpo ui` again, which reads the curves from the job's volume"
_LOST = "the pod of rank 0 does not run, and without storage.claimName the curves went with it"


class ClusterSource:
    """A GRPOJob. `fetched`: the folder of its run, where its pods were gone."""

    def __init__(self, kube: Kube, name: str, fetched: Path | None = None) -> None:
        self._fetched = None if fetched is None else FolderSource(fetched)
        self.shown = Shown(title=f"{kube.namespace}/{name}", where="cluster")
        self._kube, self._reader, self._launchers = kube, JobReader(kube, name), Launchers(kube)
        self._uid: str | None = None

    def refresh(self) -> None:
        """Implement `Source.refresh`."""
        try:
            job, pods, view = self._reader.read()
            status = read_status(job.get("status"))
            # A job takes what its site says when it is accepted, and keeps it.
            layers = read_site(self._kube)[0] if status.attempt is None and status.site is None else None
        except click.ClickException as error:  # for example: no such job
            raise SourceError(error.message) from error
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            raise SourceError(explain(error).message) from error
        self.shown.job = to_jsonable_python(view) | {
            "conditions": to_jsonable_python(status.conditions),
            "pods": _pods(job, pods),
        }
        self.shown.to_plan, self.shown.note = read_job(job, layers), view.note
        uid = job["metadata"]["uid"]
        if self._uid not in (None, uid):  # it was deleted, and created again with the same name
            self._forget()
        self._uid = uid
        self._read_history(job, pods)

    def _forget(self) -> None:
        self._fetched, self.shown.changed, self.shown.logs = None, None, {}
        self.shown.history.clear()

    def _read_history(self, job: Object, pods: Sequence[Object]) -> None:
        if (master := serving_master(job, pods)) is None:
            if self._fetched is not None:
                self._fetched.refresh()
                there = self._fetched.shown
                self.shown.history, self.shown.changed, self.shown.logs = there.history, there.changed, there.logs
                return
            if may_have_curves(job):
                has_claim = "claimName" in mapping(job["spec"].get("storage"))
                self.shown.note = self.shown.note or (_GONE if has_claim else _LOST)
            return
        if self._fetched is not None:  # it runs again
            self._forget()
        try:
            is_new_attempt, rows = self._launchers.history(master, {}, after=self.shown.history.last_step)
        except PodError as error:
            self.shown.note = str(error)
            return
        if is_new_attempt:
            self.shown.history.clear()
        self.shown.history.add(rows)


def _pods(job: Object, pods: Sequence[Object]) -> list[dict[str, Any]]:
    topology = read_topology(job)
    ranks = ranks_of(topology) if topology else {}
    rows = []
    for pod in pods:
        seen, own = read_pod(pod), ranks.get(pod["metadata"]["name"], range(0))
        rows.append(
            {
                "name": pod["metadata"]["name"],
                "node": pod["spec"].get("nodeName") or "",
                "phase": pod.get("status", {}).get("phase", ""),
                "ready": seen.ready,
                "waiting": seen.waiting or seen.unschedulable or "",
                "ranks": list(own),
            }
        )
    return rows
