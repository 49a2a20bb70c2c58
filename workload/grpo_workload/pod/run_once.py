"""Run once, then hold: the life of a pod's first process, trainer or engine.

The kubelet restarts a container whatever its exit code. So the process marks the attempt as started before it starts
anything, and stores the outcome next to the mark, on a volume that outlives the container. When it is started again, it
reports the stored outcome and waits: until the pod is deleted, or until the operator begins a later attempt in it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from grpo_spec.contract import ENV_POD_UID, ENV_TERMINATION_LOG, TERMINATION_LOG
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.pod.contract_file import ContractError, ThisPod
from grpo_workload.pod.versions import describe_untried

logger = logging.getLogger(__name__)

FAILURES = (ExitCode.RANK_FAILED, ExitCode.CONFIG_ERROR)
PodT = TypeVar("PodT", bound=ThisPod)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """The mark and the outcome of the pod's attempt, as files in its state folder."""

    pod: ThisPod

    @property
    def _dir(self) -> Path:
        return self.pod.state_dir / f"attempt-{self.pod.contract.attempt}"

    @property
    def has_begun(self) -> bool:
        """Whether this pod has started this attempt before."""
        return (self._dir / "started").exists()

    @property
    def outcome(self) -> Outcome | None:
        """Stored outcome of this pod's part of the attempt, if it has ended."""
        path = self._dir / "result.json"
        return Outcome.model_validate_json(path.read_text()) if path.exists() else None

    def begin(self) -> None:
        """Mark the attempt as started. From here on this pod never starts it again."""
        self._dir.mkdir(parents=True, exist_ok=True)
        (self._dir / "started").touch(exist_ok=False)
        self.pod.termination_log.write_text("")  # what an earlier attempt in this container has reported

    def finish(self, outcome: Outcome) -> None:
        """Store the outcome, and report it to the kubelet."""
        fresh = self._dir / "result.tmp"
        fresh.write_text(outcome.model_dump_json(by_alias=True, exclude_none=True))
        fresh.replace(self._dir / "result.json")
        self.report(outcome)

    def report(self, outcome: Outcome) -> None:
        """Write the outcome as the container's termination message."""
        self.pod.termination_log.write_text(outcome.to_message())


def read_or_refuse(role: type[PodT], environ: Mapping[str, str]) -> PodT | None:
    """Return this pod in its role, or None after logging why it cannot run; a refused contract is also reported."""
    try:
        return role.read(environ)
    except ValueError as error:
        logger.error("%s", error)
        if isinstance(error, ContractError):
            refusal = Outcome(
                attempt=error.attempt,
                pod_uid=environ.get(ENV_POD_UID, ""),
                exit_code=ExitCode.CONFIG_ERROR,
                reason=Reason.CONTRACT_REFUSED,
                message=str(error),
            )
            Path(environ.get(ENV_TERMINATION_LOG, TERMINATION_LOG)).write_text(refusal.to_message())
        return None


async def run_once(
    pod: ThisPod,
    run: Callable[[asyncio.Event], Awaitable[Outcome]],
    *,
    on_outcome: Callable[[Outcome], object] = lambda _: None,
) -> Outcome | None:
    """Run this pod's part of the attempt, or hold if it has run before.

    Args:
        pod: this pod.
        run: does the work. Its argument is the event that SIGTERM and SIGINT set, and the contract of a later attempt.
        on_outcome: called when the outcome is stored and final, also before holding.

    Returns:
        How this pod's part of the attempt ended; after a hold, the outcome of the earlier run. None if a later attempt
        begins in this pod: its contract is there to be read and run.
    """
    record = AttemptRecord(pod)
    if record.has_begun and record.outcome is None:
        record.finish(outcome := _killed_outcome(pod))
        return outcome
    signalled, stop = asyncio.Event(), asyncio.Event()

    def end() -> None:
        signalled.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    newer = asyncio.create_task(_set_when_newer(pod, stop))
    try:
        outcome = await _run_or_hold(record, run, stop, on_outcome)
    finally:
        newer.cancel()
    return None if stop.is_set() and not signalled.is_set() else outcome


async def _set_when_newer(pod: ThisPod, stop: asyncio.Event) -> None:
    await pod.newer_contract()
    logger.info("a later attempt than %d begins in this pod", pod.contract.attempt)
    stop.set()


async def _run_or_hold(
    record: AttemptRecord,
    run: Callable[[asyncio.Event], Awaitable[Outcome]],
    stop: asyncio.Event,
    on_outcome: Callable[[Outcome], object],
) -> Outcome:
    if earlier := record.outcome:
        record.report(earlier)
        on_outcome(earlier)
        logger.info("attempt %d ended here before with %s; waiting", earlier.attempt, earlier.reason)
        await stop.wait()
        return earlier
    record.begin()
    try:
        outcome = await run(stop)
    except Exception as error:  # whatever it is, people must be able to read it
        logger.exception("the launcher failed")
        outcome = _internal_error(record.pod, error)
    record.finish(outcome)
    on_outcome(outcome)
    logger.info("ended with %s: %s", outcome.reason, outcome.message)
    return outcome


def make_outcome(pod: ThisPod, exit_code: ExitCode, reason: Reason, message: str) -> Outcome:
    """Return an outcome of this pod's part of the attempt. A failure names versions that were not tried."""
    if exit_code in FAILURES and (untried := describe_untried(pod.contract)):
        message = f"{message}\n{untried}"
    return Outcome(
        attempt=pod.contract.attempt, pod_uid=pod.pod_uid, exit_code=exit_code, reason=reason, message=message
    )


def _internal_error(pod: ThisPod, error: Exception) -> Outcome:
    *_, innermost = traceback.extract_tb(error.__traceback__)
    message = (
        f"pod {pod.pod}: its launcher failed with {type(error).__name__}: {error} "
        f"({innermost.filename}:{innermost.lineno}); the pod's log has the traceback"
    )
    return make_outcome(pod, ExitCode.RANK_FAILED, Reason.INTERNAL_ERROR, message)


def _killed_outcome(pod: ThisPod) -> Outcome:
    message = (
        f"pod {pod.pod}: the container was killed before it could record an outcome, probably because it ran out of "
        "memory: raise resources.limits.memory, or use more pods with fewer ranks each"
    )
    return make_outcome(pod, ExitCode.RANK_FAILED, Reason.LAUNCHER_DIED, message)
