"""A launcher's answer to its peers on GET /identity: names and numbers, since everybody may ask."""

from __future__ import annotations

from grpo_spec.reports import ExitCode
from grpo_spec.schema import Section


class Ended(Section):
    """The end of a launcher. Its message is in the pod's termination message only, as it may quote completions."""

    reason: str
    exit_code: ExitCode
    rank: int | None = None  # the rank that failed first, if one did
    seconds_ago: float  # not a time, because the clocks of pods differ
    is_final: bool  # false while it may still ask its peers which of them failed first


class Identity(Section):
    """The pod that answers, and its end if it has ended."""

    pod: str
    pod_uid: str
    attempt: int
    ended: Ended | None = None
    local_port: int = 0  # port on the pod's loopback that serves GET /history
