"""Measurements of jobs that start and restart, one function for each scenario; each returns raw values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.control_plane.client import ADMIN, AT_ONCE
from benchmarks.control_plane.manifests import failed_rank, job_name, job_of
from benchmarks.control_plane.observer import AuditLog, Event, Processors, counted, is_write, resource, seconds
from benchmarks.control_plane.turn import Raw, Turn, rounded, settle
from grpo_operator.api.names import CHILD_KINDS, PATHS

FOUR = (1, 3)
CHILDREN = {PATHS[kind].rpartition("/")[2] for kind in CHILD_KINDS}
SINGLES = 5
"""Jobs that fail one after the other before all fail at once."""


def start(turn: Turn, count: int) -> Raw:
    """Jobs of 4 pods at once."""
    return turn.create(count, FOUR)


def one_job(turn: Turn, count: int) -> Raw:
    """One job of that many pods."""
    return turn.create(1, (1, count - 1))


def burst(turn: Turn, count: int) -> Raw:
    """Jobs at once, and for each the seconds from its creation until its last child is applied."""
    log = AuditLog(turn.nodes.plane.audit_log)
    found = turn.create(count, FOUR)
    settle()  # what the operator still does for new jobs counts
    requests, created = log.requests(turn.side.user), _created(log)
    last: dict[str, float] = {}
    children: Counter[str] = Counter()
    for event in requests:
        if is_write(event) and event["responseStatus"]["code"] == 201 and resource(event) in CHILDREN:
            job = job_in(event)
            children[job] += 1
            last[job] = max(seconds(event), last.get(job, 0.0))
    if short := [job for job in created if children[job] < len(CHILDREN) + 1]:  # there are two StatefulSets
        raise RuntimeError(f"the audit log lacks children of {short[:3]}")
    found["requests"] = counted(requests)
    found["raw"]["children"] = rounded([last[job] - at for job, at in created.items()])
    return found


def restart(turn: Turn, count: int) -> Raw:
    """Some jobs fail one after the other, then all of them at once; seconds until all their pods are ready again."""
    turn.create(count, FOUR)
    settle()
    names = list(map(job_name, range(count)))
    again = _restart_by_hand if turn.statuses is None else _fail
    log, processors = AuditLog(turn.nodes.plane.audit_log), Processors()
    one: dict[str, list[float]] = {"whole": [], "operator": []}
    for name in names[:SINGLES]:
        for part, values in again(turn, [name]).items():
            one[part] += values
        settle()
    processors.busy()
    together = again(turn, names)
    return {
        "jobs": count,
        "pods": count * sum(FOUR),
        "shape": FOUR,
        "busy": round(processors.busy(), 3),
        "requests": counted(log.requests(turn.side.user)) if turn.side.user else {},
        "raw": {
            "one": rounded(one["whole"]),
            "together": rounded(together["whole"]),
            "operator one": rounded(one["operator"]),
            "operator together": rounded(together["operator"]),
        },
    }


def _fail(turn: Turn, names: list[str]) -> dict[str, list[float]]:
    """Report a failed rank of each job.

    Returns for each job the seconds from the first failure until it runs again, and the operator's part of its restart:
    from its own failure until its status says that it restarts, plus from its last pod's end until all is scaled up.
    """
    assert turn.statuses is not None
    statuses, before = turn.statuses, turn.statuses.numbers()
    log, begin = AuditLog(turn.nodes.plane.audit_log), time.time()
    _each(
        names, lambda name: turn.api.patch(turn.namespace, "Pod", f"{name}-b-0", failed_rank(), subresource="/status")
    )

    def all_run() -> bool:
        now = statuses.numbers()
        return all(now[name] > before[name] for name in names)

    turn.wait(all_run, "failed jobs run again")
    whole = [statuses.first[name, before[name] + 1] - begin for name in names]
    failed, gone, said, scaled = _moments(log.news(b'"code":200', turn.namespace.encode()), turn.side.user)
    part = [said[name] - failed[name] + max(0.0, scaled[name] - gone[name]) for name in names]
    return {"whole": whole, "operator": part}


def _moments(events: list[Event], user: str) -> tuple[dict[str, float], ...]:
    """Return when each job failed, lost its last pod, said so first, and had a StatefulSet scaled up last."""
    failed: dict[str, float] = {}
    gone, said, scaled = dict(failed), dict(failed), dict(failed)
    for event in events:
        who, what, job, at = event["user"]["username"], (event["verb"], resource(event)), job_in(event), seconds(event)
        if who == "kwok" and what == ("delete", "pods"):
            gone[job] = at
        elif who == user and what[1] == "grpojobs" and is_write(event):
            said.setdefault(job, at)
        elif who == user and what[1] == "statefulsets" and is_write(event):
            scaled[job] = at
        elif who == ADMIN and what == ("patch", "pods"):
            failed[job] = at
    return failed, gone, said, scaled


def _restart_by_hand(turn: Turn, names: list[str]) -> dict[str, list[float]]:
    """Scale the StatefulSets of each job to 0 and, once its pods are gone, up again; return seconds as `_fail` does."""
    begin, all_pods = time.time(), sum(FOUR) * len(names)

    def scale(name: str, replicas: tuple[int, int]) -> None:
        for group, count in zip("ab", replicas, strict=True):
            turn.api.patch(turn.namespace, "StatefulSet", f"{name}-{group}", {"spec": {"replicas": count}})

    _each(names, lambda name: scale(name, (0, 0)))
    down = set(names)

    def are_up() -> bool:
        ready = turn.pods.are_ready(all_pods, begin)
        gone = Counter(job_of(pod) for pod, at in turn.pods.gone.items() if at >= begin)
        empty = [name for name in down if gone[name] == sum(FOUR)]
        _each(empty, lambda name: scale(name, FOUR))
        down.difference_update(empty)
        return ready

    turn.wait(are_up, "pods are ready again")
    return {"whole": [at - begin for at in turn.pods.ready_jobs(begin).values()], "operator": []}


def _each(names: list[str], do: Callable[[str], object]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(do, names))


def _created(log: AuditLog) -> dict[str, float]:
    """Return when each GRPOJob was created."""
    posts = log.news(b'"verb":"create"', b'"resource":"grpojobs"')
    return {event["objectRef"]["name"]: seconds(event) for event in posts}


def job_in(event: Event) -> str:
    """Return the job that a request is about, by the name of its object."""
    return job_of(str(event.get("objectRef", {}).get("name", "")))
