"""Read what one screen needs from the API server and the launchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kubernetes.client.exceptions import ApiException

from grpo_cli.cluster.kube import Kube, Object
from grpo_cli.cluster.launchers import Launchers
from grpo_cli.cluster.pod_http import PodError
from grpo_cli.errors import CliError, Exit
from grpo_cli.screen.pods import running_pods
from grpo_cli.screen.training import LauncherReport, is_stuck
from grpo_cli.screen.view import JobView, make_view, read_topology, serving_master
from grpo_operator.api.status import read_status
from grpo_spec.contract import Member
from grpo_spec.reports import Progress

COMPLETIONS = 16
"""Most completions that a step keeps for reading, and some more."""
ROWS = 200
"""Number of steps in the curve."""
PODS_ASKED = 16
"""Number of launchers that are asked for the phases of their ranks when no step is finished."""


class JobReader:
    """Reads a job repeatedly; keeps its curve, so that only new rows are requested."""

    def __init__(self, kube: Kube, name: str) -> None:
        self._kube, self._name, self._launchers = kube, name, Launchers(kube)
        self._uid, self._rows = "", list[Mapping[str, Any]]()

    def read(self) -> tuple[Object, list[Object], JobView]:
        """Return the job, its pods and its screen at this moment. Raises CliError, ApiException."""
        job = self._kube.job(self._name)
        if job["metadata"]["uid"] != self._uid:  # the first one, or one that was created again with the same name
            self._uid, self._rows = job["metadata"]["uid"], []
        pods = self._kube.pods(job)
        report = self._report(job, pods)
        return job, pods, make_view(job, pods, self._events(job, pods), report, datetime.now(UTC))

    def completions(self, job: Object, pods: Sequence[Object]) -> list[Mapping[str, Any]]:
        """Return the completions of the newest step that are kept for reading. Raises CliError if no pod has them."""
        if (master := serving_master(job, pods)) is None:
            raise CliError(
                "the pod of rank 0 does not run: `grpo ui --folder` shows completions, which are on the job's volume",
                Exit.NOT_FOUND,
            )
        try:
            what: dict[str, str | int] = {"of": "completions", "limit": COMPLETIONS}
            _, rows = self._launchers.history(master, what, after=-1)
        except PodError as error:
            raise CliError(str(error), Exit.UNREACHABLE) from error
        found = rows["completions"]
        return [row for row in found if row["step"] == found[-1]["step"]]

    def _events(self, job: Object, pods: Sequence[Object]) -> list[Object]:
        uids = {job["metadata"]["uid"], *(pod["metadata"]["uid"] for pod in pods)}
        names = {f"{self._name}-{group.name}" for group in read_status(job.get("status")).groups}
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

    def _report(self, job: Object, pods: Sequence[Object]) -> LauncherReport:
        if (master := serving_master(job, pods)) is None:
            return LauncherReport(metrics=self._rows)
        try:
            progress = Progress.read(self._launchers.get(master, "/progress"))
            self._read_rows(master)
        except PodError as error:
            return LauncherReport(metrics=self._rows, note=str(error).partition("\n")[0])
        phases: dict[int, str] = {}
        if is_stuck(progress) and (topology := read_topology(job)):
            running = running_pods(pods)
            for member in [member for member in topology.members if member.pod in running][:PODS_ASKED]:
                phases |= self._phases(member)
        return LauncherReport(progress=progress, metrics=self._rows, rank_phases=phases)

    def _phases(self, member: Member) -> dict[int, str]:
        try:
            phases = Progress.read(self._launchers.get(member, "/progress")).rank_phases
        except PodError:  # the screen then shows no phase for these ranks
            return {}
        return {int(rank): phase.partition(" for ")[0] for rank, phase in phases.items()}

    def _read_rows(self, master: Member) -> None:
        after = self._rows[-1]["step"] if self._rows else -1
        is_new_attempt, history = self._launchers.history(master, {"of": "metrics", "limit": ROWS}, after=after)
        self._rows = [*([] if is_new_attempt else self._rows), *history["metrics"]][-ROWS:]
