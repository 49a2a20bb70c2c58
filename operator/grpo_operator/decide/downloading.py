"""Whether the model and the datasets are in the cache before the first attempt (cache.prefetch). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from grpo_operator.api.status import Failure, GRPOJobStatus
from grpo_operator.api.times import LONG_AGO, rfc3339, seconds_between
from grpo_operator.decide.blame import Reports
from grpo_operator.decide.conditions import is_terminal
from grpo_operator.decide.objects import condition
from grpo_operator.decide.observe import Child, Observed, is_being_deleted
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.downloads import wanted_downloads
from grpo_operator.layout.job import Job
from grpo_spec.lenient import clip, mapping, text
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode


@dataclass(frozen=True, slots=True)
class DownloadSteps:
    """Steps about the Job that downloads."""

    create: bool = False
    removals: tuple[Child, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.create or self.removals)


def is_done(job: Job, status: GRPOJobStatus, observed: Observed) -> bool:
    """Whether nothing has to be downloaded before the next attempt."""
    if not job.spec.cache.prefetch or status.attempt is not None:
        return True
    wanted = wanted_downloads(job)
    return (wanted.model is None and not wanted.datasets) or any(_is(one, "Complete") for one in _jobs(observed))


def is_off(job: Job, status: GRPOJobStatus, observed: Observed, *, waits: bool) -> bool:
    """Whether nothing is to be downloaded now. `waits`: nothing of the job may run."""
    is_held = (job.queue is not None and job.admission is None) or bool(observed.foreign)
    return waits or is_held or status.attempt is not None or is_terminal(status)


def needs_job(job: Job, status: GRPOJobStatus, observed: Observed) -> bool:
    """Whether the Job that downloads is to be created."""
    return not (is_done(job, status, observed) or _jobs(observed))


def find_steps(job: Job, status: GRPOJobStatus, observed: Observed, now: datetime, *, waits: bool) -> DownloadSteps:
    """Return what to do about the Job. `waits`: nothing may run; what is downloaded stays in the cache."""
    found = tuple(one for one in _jobs(observed) if not is_being_deleted(one))
    failed = tuple(one for one in found if _is(one, "Failed"))
    if is_terminal(status):  # a failed one is kept: its pod's log says why
        return DownloadSteps(removals=tuple(one for one in found if one not in failed))
    if is_off(job, status, observed, waits=waits):
        return DownloadSteps(removals=found)
    at = status.download.retry_time if status.download else None
    if at is not None and seconds_between(at, now) >= 0:
        return DownloadSteps(removals=failed)  # then another one can have its name
    return DownloadSteps(create=needs_job(job, status, observed))


def find_failure(observed: Observed, now: datetime) -> Failure | None:
    """Return how the last try failed, or None if none has."""
    # Its Job waits for ever for a pod without a container: one whose image has a name that is none.
    never = {
        pod.controller
        for pod in observed.downloaders
        if pod.outcome and pod.outcome.reason == Reason.CONFIG_ERROR and pod.outcome.exit_code < 0
    }
    failed = next((one for one in _jobs(observed) if _is(one, "Failed") or one.uid in never), None)
    if failed is None:
        return None
    said = _failed_last(observed, failed.uid)
    outcome = said.outcome if said else None
    why = outcome.message if outcome else text(condition(mapping(failed.raw.get("status")), "Failed").get("message"))
    is_wrong = outcome is not None and (
        outcome.exit_code == ExitCode.CONFIG_ERROR or outcome.reason == Reason.CONFIG_ERROR
    )
    return Failure(
        pod=said.name if said else None,
        role="download",
        node=said.node if said else None,
        exit_code=outcome.exit_code if outcome else None,
        reason=Reason.CONFIG_ERROR if is_wrong else Reason.DOWNLOAD_FAILED,
        message=clip(f"the download into the cache failed: {why}", 4096),
        time=now,
    )


def describe(status: GRPOJobStatus, observed: Observed, reports: Reports) -> str:
    """Say how far the download is, what keeps its pod from running, or when it is tried again."""
    if (tries := status.download) is not None and tries.retry_time is not None:
        number = f"{tries.failures} times" if tries.failures > 1 else "once"
        return f"no GPU is asked for yet; failed {number}, tried again at {rfc3339(tries.retry_time)}: {tries.message}"
    running = [pod for pod in observed.downloaders if pod.outcome is None]
    if not running:
        return "no GPU is asked for yet"
    pod = running[-1]
    why = pod.unschedulable or pod.waiting
    said = reports[pod.name].phase if pod.name in reports else why or "begins"
    return f"no GPU is asked for yet; pod {pod.name}: {said}"


def _failed_last(observed: Observed, job: str) -> ObservedPod | None:
    """Return the pod that failed last of the Job with this UID."""
    failed = [pod for pod in observed.downloaders if pod.outcome and pod.controller == job]
    return max(failed, key=lambda pod: (pod.outcome and pod.outcome.finished_at) or LONG_AGO, default=None)


def find_try(observed: Observed) -> Child | None:
    """Return the Job that downloads now."""
    return next((one for one in _jobs(observed) if not (_is(one, "Complete") or _is(one, "Failed"))), None)


def _jobs(observed: Observed) -> list[Child]:
    return [child for child in observed.children if child.kind == "Job"]


def _is(job: Child, kind: str) -> bool:
    return bool(condition(mapping(job.raw.get("status")), kind).get("status") == "True")
