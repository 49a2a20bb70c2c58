"""Requests to the launchers of one job; of the run's history, only new rows are requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_cli.cluster.kube import Kube
from grpo_cli.cluster.pod_http import PodError, get_json
from grpo_spec.contract import Member

History = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by file name, without .jsonl."""


class Launchers:
    """The launchers of a job over its attempts."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: tuple[object, int] | None = None  # rank 0's pod and its attempt: a new job begins with 0 again

    def get(self, member: Member, path: str) -> Any:
        """Return the JSON at `path` of a pod's launcher. Raises PodError."""
        return self._get(member, member.status_port, path)

    def _get(self, member: Member, port: int, path: str) -> Any:
        return get_json(self._kube.api, self._kube.namespace, member.pod, port, path)

    def history(self, master: Member, what: Mapping[str, str | int], *, after: int) -> tuple[bool, History]:
        """Return whether the rows replace all earlier ones, and the rows of steps after `after`. Raises PodError.

        Rows of a new attempt replace the earlier ones, since it may have repeated steps: all its rows are requested.
        `what` are further parameters of GET /history.
        """
        query = "".join(f"{name}={value}&" for name, value in what.items())
        # The history is served on the pod's loopback, and the launcher's port there is another after each start.
        identity = self.get(master, "/identity")
        if not (port := identity.get("localPort")):
            raise PodError(f"pod {master.pod} runs an older image: `grpo` of that release shows its curves")
        answer = self._get(master, port, f"/history?{query}after={after}")
        now = (identity.get("podUid"), answer["attempt"])
        is_new_attempt = self._known not in (None, now)
        if is_new_attempt:
            answer = self._get(master, port, f"/history?{query}after=-1")
        self._known = now
        return is_new_attempt, answer
