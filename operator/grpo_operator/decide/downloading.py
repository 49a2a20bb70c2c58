"""Whether the model and the datasets are in the cache before the first attempt (cache.prefetch). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_operator.api.status import Failure, GRPOJobStatus
from grpo_operator.decide.blame import Reports
from grpo_operator.decide.conditions import is_terminal
from grpo_operator.decide.objects import condition
from grpo_operator.decide.observe import Child, Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.downloads import wanted_downloads
from grpo_operator.layout.topology import Job
from grpo_spec.lenient import clip, mapping, text
from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode


@dataclass(frozen=True, slots=True)
class DownloadSteps:
    """What to do about the Job that downloads."""

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


def needs_job(job: Job, status: GRPOJobStatus, observed: Observed) -> bool:
    """Whether the Job that downloads is to be created."""
    return not (is_done(job, status, observed) or _jobs(observed))


def find_steps(job: Job, status: GRPOJobStatus, observed: Observed, *, waits: bool) -> DownloadSteps:
    """Return what to do about the Job. `waits`: nothing may run; what is downloaded stays in the cache."""
    found = tuple(one for one in _jobs(observed) if "deletionTimestamp" not in one.raw["metadata"])
    waits = waits or (job.queue is not None and job.admission is None) or bool(observed.foreign)
    if is_terminal(status):  # a failed one is kept: its pod's log says why
        return DownloadSteps(removals=tuple(one for one in found if not _is(one, "Failed")))
    if status.attempt is not None or waits:
        return DownloadSteps(removals=found)
    return DownloadSteps(create=needs_job(job, status, observed))


def find_failure(job: Job, observed: Observed, now: str) -> Failure | None:
    """Return why the download is given up, or None while it goes on."""
    failed = next((one for one in _jobs(observed) if _is(one, "Failed")), None)
    if failed is None:
        return None
    said = _failed_last(observed)
    outcome = said.outcome if said else None
    why = outcome.message if outcome else text(condition(mapping(failed.raw.get("status")), "Failed").get("message"))
    is_wrong = outcome is not None and outcome.exit_code == ExitCode.CONFIG_ERROR
    return Failure(
        pod=said.name if said else None,
        role="download",
        node=said.node if said else None,
        exit_code=outcome.exit_code if outcome else None,
        reason=Reason.CONFIG_ERROR if is_wrong else Reason.DOWNLOAD_FAILED,
        message=clip(f"the download into the cache failed: {why}", 4096),
        time=now,
    )


def describe(observed: Observed, reports: Reports) -> str:
    """Say how far the download is, or what keeps its pod from running."""
    running = [pod for pod in observed.downloaders if pod.outcome is None]
    if not running:
        failed = _failed_last(observed)
        outcome = failed.outcome if failed else None
        return f"the download is tried again: {outcome.message}" if outcome else "no GPU is asked for yet"
    pod = running[-1]
    why = pod.unschedulable or pod.waiting
    said = reports[pod.name].phase if pod.name in reports else why or "begins"
    return f"no GPU is asked for yet; pod {pod.name}: {said}"


def _failed_last(observed: Observed) -> ObservedPod | None:
    """Return the pod that failed last. One that ended well has left no result, as none is asked of it."""
    failed = [p for p in observed.downloaders if p.outcome and p.outcome.reason != Reason.OUTCOME_MISSING]
    return max(failed, key=lambda pod: pod.outcome.finished_at if pod.outcome else "", default=None)


def _jobs(observed: Observed) -> list[Child]:
    return [child for child in observed.children if child.kind == "Job"]


def _is(job: Child, kind: str) -> bool:
    return bool(condition(mapping(job.raw.get("status")), kind).get("status") == "True")
