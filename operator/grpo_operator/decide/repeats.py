"""Whether an attempt failed of what the attempt before failed of: a restart would only meet it again. Pure.

Only exceptions are compared: of a program that does the same with the same data. What may pass by itself never counts
as repeated, even if the words are the same: memory, devices, the network, storage, engines.
"""

from __future__ import annotations

import re

from grpo_operator.api.status import Failure, GRPOJobStatus
from grpo_operator.decide.edits import edit
from grpo_spec.reasons import Reason

_EXCEPTION = re.compile(r"failed with exit code \d+: (?=\w+: )(.*)", re.DOTALL)
"""Finds a rank's exception, with its traceback, in a launcher's message: `rank 3 failed with exit code 1: KeyError: 1`.
Where a rank left none, its phase or its log follows, which is no single word."""

_PASSES = re.compile(
    r"memory|alloc|killed|signal|cuda|cublas|cudnn|nccl|gloo|nvlink|\becc\b|accelerator|distbackend|distnetwork"
    r"|diststore|rendezvous|connect|socket|network|time[d ]*out|http|\burl|\bssl|\bdns\b|resolv|unreachable|refused"
    r"|broken pipe|\bhub\b|oserror|ioerror|errno|no space|quota|input/output|stale|storage|superseded|engine|evict"
    r"|preempt|unavailable|busy|jsondecode|safetensor|arrow|zipfile|eoferror|unpickl|incomplete|corrupt|checksum",
    re.IGNORECASE,
)
"""Words of exceptions that may pass by themselves."""

_OF_A_RANK = (Reason.RANK_FAILED, Reason.REPEATED_FAILURE)


def named_if_repeated(failure: Failure, status: GRPOJobStatus) -> Failure:
    """Return the failure with its step, and as RepeatedFailure if the attempt before ended with the same exception at
    the same step.
    """
    failure, last = edit(failure, step=step_of_attempt(status)), status.last_failure
    if last is None or status.recent_restarts is None:
        return failure  # it made progress since
    if status.running_time is not None and not _has_reported(status):
        return failure  # nobody knows at which step it failed
    return edit(failure, reason=Reason.REPEATED_FAILURE) if is_repeated(failure, last) else failure


def is_repeated(failure: Failure, last: Failure) -> bool:
    """Whether a rank has raised what one raised in the attempt before, which ended with `last`, at the same step."""
    if last.attempt != failure.attempt - 1 or last.step != failure.step:
        return False
    if failure.reason != Reason.RANK_FAILED or last.reason not in _OF_A_RANK:
        return False
    said = _exception(failure.message)
    return said is not None and said == _exception(last.message)


def step_of_attempt(status: GRPOJobStatus) -> int:
    """Return the number of steps that were done when the current attempt last reported; 0 if it has not reported."""
    return status.progress.step if status.progress is not None and _has_reported(status) else 0


def _has_reported(status: GRPOJobStatus) -> bool:
    progress, began = status.progress, status.attempt_start_time
    return progress is not None and began is not None and progress.time >= began


def _exception(message: str) -> str | None:
    """Return the text of an exception that comes again if the same is done again, or None.

    Without the rank, which may be another one, and without addresses of objects.
    """
    if (found := _EXCEPTION.search(message)) is None:
        return None
    text = found[1]
    said = "\n".join(line for line in text.splitlines() if not line.startswith(" "))  # without the frames' paths
    return None if _PASSES.search(said) else re.sub(r"0x[0-9a-f]+", "0x", text)
