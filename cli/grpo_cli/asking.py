"""Everything that one screen needs, asked of the API server and of the launchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kubernetes.client.exceptions import ApiException
from pydantic import ValidationError

from grpo_cli.errors import said_by
from grpo_cli.kube import Kube, Object
from grpo_cli.pod_http import PodError, get_json
from grpo_cli.pods_view import ranks_of
from grpo_cli.training_view import Told, is_stuck
from grpo_cli.view import JobView, make_view, read_status, read_topology
from grpo_operator.status import is_terminal
from grpo_workload.contract import Progress

ROWS = 200
"""Steps of which the curve is shown."""
PODS_ASKED = 16
"""Launchers that are asked what their ranks are at when no step is made."""


class Asker:
    """Looks at a job again and again; keeps the curve, of which only what is new is asked for."""

    def __init__(self, kube: Kube, name: str) -> None:
        self._kube, self._name = kube, name
        self._epoch: int | None = None
        self._rows: list[Mapping[str, Any]] = []

    def look(self) -> tuple[Object, JobView]:
        """The job and its screen, as of now. Raises CliError, ApiException, StatusError."""
        job = self._kube.job(self._name)
        pods = self._kube.pods(job)
        told = self._ask(job, pods)
        return job, make_view(job, pods, self._events(job, pods), told, datetime.now(UTC))

    def _events(self, job: Object, pods: Sequence[Object]) -> list[Object]:
        uids = {job["metadata"]["uid"], *(pod["metadata"]["uid"] for pod in pods)}
        names = {f"{self._name}-{group.name}" for group in read_status(job).groups}
        try:
            events = self._kube.listed("Event")
        except ApiException as error:
            if error.status == 403:
                return []
            raise
        return [
            event
            for event in events
            if event["involvedObject"].get("uid") in uids
            or (event["involvedObject"].get("kind") == "StatefulSet" and event["involvedObject"].get("name") in names)
        ]

    def _ask(self, job: Object, pods: Sequence[Object]) -> Told:
        topology, status = read_topology(job), read_status(job)
        running = {pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"}
        if topology is None or is_terminal(status) or not running:
            return Told(metrics=self._rows)
        master, port = topology.members[0].pod, job["spec"].get("rendezvous", {}).get("statusPort", 29501)
        if master not in running:
            return Told(metrics=self._rows)
        try:
            progress = Progress.model_validate(self._get(master, port, "/progress"))
            self._read_rows(master, port)
        except (PodError, ValidationError) as error:
            return Told(metrics=self._rows, note=_first_line(error))
        phases: dict[int, str] = {}
        if is_stuck(progress):
            for pod in [pod for pod in ranks_of(topology) if pod in running][:PODS_ASKED]:
                phases |= self._phases(pod, port)
        return Told(progress=progress, metrics=self._rows, rank_phases=phases)

    def _phases(self, pod: str, port: int) -> dict[int, str]:
        try:
            told = self._get(pod, port, "/progress").get("rankPhases", {})
        except PodError:  # a rank that is not told is shown by its absence
            return {}
        return {int(rank): phase.partition(" for ")[0] for rank, phase in told.items()}

    def _read_rows(self, master: str, port: int) -> None:
        after = self._rows[-1]["step"] if self._rows else -1
        told = self._get(master, port, f"/history?of=metrics&limit={ROWS}&after={after}")
        if told["epoch"] != self._epoch and self._rows:
            told = self._get(master, port, f"/history?of=metrics&limit={ROWS}")
            self._rows = []
        self._epoch = told["epoch"]
        self._rows = [*self._rows, *told["metrics"]][-ROWS:]

    def _get(self, pod: str, port: int, path: str) -> Any:
        return get_json(self._kube.api, self._kube.namespace, pod, port, path)


def _first_line(error: Exception) -> str:
    return (said_by(error) if isinstance(error, ApiException) else str(error)).partition("\n")[0]
