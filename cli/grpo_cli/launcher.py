"""The launchers of one job, asked again and again: of the run's history, only for what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_cli.kube import Kube
from grpo_cli.pod_http import get_json
from grpo_workload.contract import Member

History = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by file."""


class Launchers:
    """Of a job, over its attempts."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._epoch: int | None = None

    def get(self, member: Member, path: str) -> Any:
        """The JSON at `path` of a pod's launcher. Raises PodError."""
        return get_json(self._kube.api, self._kube.namespace, member.pod, member.status_port, path)

    def history(self, master: Member, what: Mapping[str, str | int], *, after: int) -> tuple[bool, History]:
        """Rows of the run by file, of steps later than `after`; and whether they stand for all rows before. Raises PodError.

        They do in another epoch than at the last call, which may have taken steps anew: all of its rows are asked for then. `what` are
        further parameters of GET /history.
        """
        query = "".join(f"{name}={value}&" for name, value in what.items())
        told = self.get(master, f"/history?{query}after={after}")
        is_anew = self._epoch not in (None, told["epoch"])
        if is_anew:
            told = self.get(master, f"/history?{query}after=-1")
        self._epoch = told["epoch"]
        return is_anew, told
