"""Everything that one screen needs, asked of the API server and of the launchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kubernetes.client.exceptions import ApiException
from pydantic import ValidationError

from grpo_cli.errors import said_by
from grpo_cli.kube import Kube, Object
from grpo_cli.launcher import Launchers
from grpo_cli.pod_http import PodError
from grpo_cli.pods_view import running_pods
from grpo_cli.training_view import Told, is_stuck
from grpo_cli.view import JobView, make_view, read_status, read_topology
from grpo_operator.status import is_terminal
from grpo_workload.contract import Member, Progress

ROWS = 200
"""Steps of which the curve is shown."""
PODS_ASKED = 16
"""Launchers that are asked what their ranks are at when no step is made."""


class Asker:
    """Looks at a job again and again; keeps the curve, of which only what is new is asked for."""

    def __init__(self, kube: Kube, name: str) -> None:
        self._kube, self._name, self._launchers = kube, name, Launchers(kube)
        self._rows: list[Mapping[str, Any]] = []

    def look(self) -> tuple[Object, list[Object], JobView]:
        """The job, its pods and its screen, as of now. Raises CliError, ApiException, StatusError."""
        job = self._kube.job(self._name)
        pods = self._kube.pods(job)
        told = self._ask(job, pods)
        return job, pods, make_view(job, pods, self._events(job, pods), told, datetime.now(UTC))

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
        running = running_pods(pods)
        if topology is None or is_terminal(status) or topology.members[0].pod not in running:
            return Told(metrics=self._rows)
        master = topology.members[0]
        try:
            progress = Progress.model_validate(self._launchers.get(master, "/progress"))
            self._read_rows(master)
        except (PodError, ValidationError) as error:
            return Told(metrics=self._rows, note=_first_line(error))
        phases: dict[int, str] = {}
        if is_stuck(progress):
            for member in [member for member in topology.members if member.pod in running][:PODS_ASKED]:
                phases |= self._phases(member)
        return Told(progress=progress, metrics=self._rows, rank_phases=phases)

    def _phases(self, member: Member) -> dict[int, str]:
        try:
            told = self._launchers.get(member, "/progress").get("rankPhases", {})
        except PodError:  # a rank that is not told is shown by its absence
            return {}
        return {int(rank): phase.partition(" for ")[0] for rank, phase in told.items()}

    def _read_rows(self, master: Member) -> None:
        after = self._rows[-1]["step"] if self._rows else -1
        is_anew, told = self._launchers.history(master, {"of": "metrics", "limit": ROWS}, after=after)
        self._rows = [*([] if is_anew else self._rows), *told["metrics"]][-ROWS:]


def _first_line(error: Exception) -> str:
    return (said_by(error) if isinstance(error, ApiException) else str(error)).partition("\n")[0]
