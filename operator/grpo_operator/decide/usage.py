"""The bill: GPU seconds that the job's pods have held, and what for. Pure.

What was held is counted from the pods: GPUs of each, from its scheduling until it is gone. Each moment counts once: the
status says until when it has counted. What for comes from rank 0, which adds up the seconds of all ranks and engines;
what it has not reported yet goes to what its phase says. Too much there is made up for by the reports that follow, so
the parts always add up to what was held, and each grows until an attempt loses its work.

An operator that starts goes on from the status. Of a pod that ended while none ran, it does not know what it held after
the last write of the status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.usage_status import PARTS, Usage
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.blame import Reports
from grpo_operator.decide.conditions import holds, is_terminal
from grpo_operator.decide.edits import edit
from grpo_operator.decide.observe import Observed
from grpo_operator.decide.observed_pod import ObservedPod
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_spec.reports import GpuUse, Progress

EXPLAINED = ("training", "sampling", "waiting", "idle")
"""Uses that ranks report."""

_OF_PHASES = {
    "Starting": "loading",
    "WaitingForPeers": "loading",
    "Running": "loading",
    "Loading": "loading",
    "Measuring": "loading",
    "Generating": "sampling",
    "Evaluating": "sampling",
    "Training": "training",
    "Done": "idle",
    "Stopped": "idle",
}
"""Use of ranks' GPUs by the phase of rank 0; in all other phases they wait."""


def with_usage(
    job: Job,
    topology: Topology,
    old: GRPOJobStatus,
    new: GRPOJobStatus,
    observed: Observed,
    reports: Reports,
    now: datetime,
) -> GRPOJobStatus:
    """Return the new status with the bill until now.

    The bill alone is no reason to write a status: it is as old as the last other news, except that it changes once a
    pod is gone, and once an attempt without pods has lost its work.
    """
    known = old.usage
    loses = known is not None and known.unsaved and _is_lost(old, new, observed)
    if new == old and not loses and not any(_is_news(job, pod, known) for pod in observed.gone.values()):
        return new
    held = _hold(job, topology, old, observed, now)
    if known is None and not held.seconds:
        return new
    return edit(new, usage=_count(job, topology, old, new, observed, held, _report(topology, observed, reports), now))


@dataclass(slots=True)
class _Held:
    """GPU seconds since the last count."""

    ranks: int = 0
    engines: int = 0
    loading: int = 0  # of engines that are not ready
    idle: int = 0  # of pods that have ended, or whose attempt has

    @property
    def seconds(self) -> int:
        """All of them."""
        return self.ranks + self.engines + self.loading + self.idle


def _is_counted(job: Job, pod: ObservedPod) -> bool:
    return pod.scheduled is not None and pod.is_of_an_attempt and job.spec.device.resource is not None


def _is_news(job: Job, pod: ObservedPod, known: Usage | None) -> bool:
    is_later = pod.gone_at is not None and (known is None or _unix(known.time) < _unix(pod.gone_at))
    return is_later and _is_counted(job, pod)


def _hold(job: Job, topology: Topology, status: GRPOJobStatus, observed: Observed, now: datetime) -> _Held:
    gpus = {group.name: group.gpus for group in topology.groups}
    ranks = {member.pod: member.gpus for member in topology.members}
    begin, end = _unix(status.usage.time) if status.usage else 0, _unix(now)
    held, over = _Held(), is_terminal(status)
    for pod in _own_pods(job, status, observed):
        since = max(begin, _unix(pod.scheduled or now))
        until = max(since, end if pod.gone_at is None else min(end, _unix(pod.gone_at)))
        has_ended, of_pod = until, gpus.get(pod.group, 0)
        if over or pod.attempt != status.created_for:
            has_ended = since
        elif pod.outcome is not None:
            finished = pod.outcome.finished_at
            has_ended = max(since, min(until, _unix(finished))) if finished else until
        held.idle += (until - has_ended) * of_pod
        trains = min(of_pod, ranks.get(pod.name, 0))
        if not trains and not (pod.ready or pod.outcome or pod.deletion_time or pod.gone_at):
            held.loading += (has_ended - since) * of_pod
        else:
            held.ranks += (has_ended - since) * trains
            held.engines += (has_ended - since) * (of_pod - trains)
    return held


def _own_pods(job: Job, status: GRPOJobStatus, observed: Observed) -> Iterator[ObservedPod]:
    """Yield the pods that hold GPUs, and those that have since the last count. Labels alone make no pod the job's."""
    own = {child.uid for child in observed.children if child.kind == "StatefulSet"}
    members = {member.uid for member in status.members}
    for pod in (*observed.pods.values(), *observed.gone.values()):
        is_own = pod.gone_at is None or pod.controller in own or pod.uid in members
        if is_own and _is_counted(job, pod) and not (pod.gone_at is None and pod.uid in observed.gone):
            yield pod


def _count(
    job: Job,
    topology: Topology,
    old: GRPOJobStatus,
    new: GRPOJobStatus,
    observed: Observed,
    held: _Held,
    said: Progress | None,
    now: datetime,
) -> Usage:
    known = old.usage or Usage(time=now)
    explained = _explain(topology, old, known, held, said)
    total, attempt, unsaved = Counter(known.gpu_seconds), Counter(known.attempt), Counter(known.unsaved)
    total["held"] += held.seconds
    attempt.update({use: explained[use] for use in EXPLAINED})
    explained["loading"] += held.loading
    unsaved.update({use: seconds for use, seconds in explained.items() if use != "idle"})
    explained["idle"] += held.idle
    total.update(explained)
    if _has_saved(job, old, new) or holds(new, Condition.COMPLETE):
        unsaved.clear()
    if _is_lost(old, new, observed):
        total.subtract(unsaved)
        total["lost"] += unsaved.total()
        unsaved.clear()
    if is_terminal(new) or new.attempt != old.attempt:
        attempt.clear()
    time = max(known.time, now, key=_unix)  # clocks of operators differ: no moment is counted twice
    return Usage(
        gpu_seconds={use: total[use] for use in ("held", *PARTS)},
        attempt=_some(attempt),
        unsaved=_some(unsaved),
        time=time,
    )


def _explain(
    topology: Topology, status: GRPOJobStatus, known: Usage, held: _Held, said: Progress | None
) -> Counter[str]:
    """Return what the GPUs of ranks and engines were used for: what ranks report first, the rest by rank 0's phase."""
    seconds = held.ranks + held.engines
    use = said.gpu_use if said is not None else None
    if use is not None and use.attempt != status.attempt:
        said = use = None
    missing = _missing(use, known.attempt)
    if missing.total() >= seconds:
        return _split(seconds, missing)
    rest = _split(seconds - missing.total(), {"ranks": held.ranks, "engines": held.engines})
    if said is not None:
        of_ranks = _OF_PHASES.get(said.phase, "waiting")
        of_engines = of_ranks if of_ranks in ("loading", "sampling") else "idle"
        if of_ranks == "sampling" and topology.engines:
            of_ranks = "waiting"
        return missing + Counter({of_ranks: rest["ranks"]}) + Counter({of_engines: rest["engines"]})
    if any(known.attempt.values()):  # it goes on as before, as far as is known
        return missing + _split(rest.total(), known.attempt)
    return missing + Counter({"loading" if status.running_time is None else "idle": rest.total()})


def _missing(use: GpuUse | None, counted: Mapping[str, int]) -> Counter[str]:
    said = {name: getattr(use, name) if use is not None else 0 for name in EXPLAINED}
    return Counter({name: max(0, int(value) - counted.get(name, 0)) for name, value in said.items()})


def _split(seconds: int, weights: Mapping[str, int]) -> Counter[str]:
    """Return `seconds` in parts that are as the weights; the largest one gets what rounding leaves."""
    whole = sum(weights.values())
    if not whole:
        return Counter()
    parts = Counter({name: seconds * weight // whole for name, weight in weights.items()})
    parts[max(weights, key=lambda name: weights[name])] += seconds - parts.total()
    return parts


def _report(topology: Topology, observed: Observed, reports: Reports) -> Progress | None:
    name = topology.members[0].pod
    seen = [observed.pods.get(name), *(pod for pod in observed.gone.values() if pod.name == name)]
    final = next((pod.final_progress for pod in seen if pod is not None and pod.final_progress is not None), None)
    return final or reports.get(name)


def _has_saved(job: Job, old: GRPOJobStatus, new: GRPOJobStatus) -> bool:
    """Whether the attempt has made a checkpoint that outlives it."""
    before = old.progress.checkpoint_step if old.progress else None
    after = new.progress.checkpoint_step if new.progress else None
    return job.spec.storage.claim_name is not None and after is not None and after != before


def _is_lost(old: GRPOJobStatus, new: GRPOJobStatus, observed: Observed) -> bool:
    """Whether the attempt has ended, and what it did since its last checkpoint has to be done again."""
    if old.attempt is None or holds(new, Condition.COMPLETE):
        return False
    has_ended = (is_terminal(new) or is_between_attempts(new)) and not observed.pods
    return has_ended or new.attempt != old.attempt


def _some(seconds: Counter[str]) -> dict[str, int]:
    return {name: number for name, number in seconds.items() if number > 0}


def _unix(time: datetime) -> int:
    return int(time.timestamp())
