"""What a launcher answers to its peers on GET /identity."""

from __future__ import annotations

from grpo_workload.spec.contract import ExitCode
from grpo_workload.spec.schema import Section


class Ended(Section):
    """How a launcher ended."""

    reason: str
    exit_code: ExitCode
    message: str
    seconds_ago: float  # not a time, because the clocks of pods differ
    is_final: bool  # false while it may still ask its peers which of them failed first


class Identity(Section):
    """Which pod answers, and how it ended if it has."""

    pod: str
    pod_uid: str
    attempt: int
    ended: Ended | None = None
