"""Costs of the operator when there are many jobs: memory, a quiet minute, the time after a restart, a minute in which
all jobs train.
"""

from __future__ import annotations

import statistics
import time
from datetime import UTC, datetime

from benchmarks.control_plane.launchers import launchers
from benchmarks.control_plane.manifests import job_name
from benchmarks.control_plane.observer import AuditLog, counted, is_write, resource, samples, use
from benchmarks.control_plane.scenarios import FOUR, job_in
from benchmarks.control_plane.turn import Raw, Turn, settle
from grpo_operator.api.names import PATHS
from grpo_operator.decide.second_look import News
from grpo_operator.runtime.rate_limits import RATES
from grpo_spec.contract import STATUS_PORT

SECONDS = 60
SETTLE_SECONDS = 1.2 / RATES[News.PROGRESS].all_jobs
"""For each job, until launchers are asked, and statuses written, as evenly as when jobs have trained for hours."""


def large(turn: Turn, count: int) -> Raw:
    """Create jobs of 4 pods, let a quiet minute pass, kill the operator and start it again, and let all jobs train."""
    port = turn.nodes.metrics_port
    found = turn.create(count, FOUR)
    settle()
    found["use"] = {"running": use(port)}
    found["quiet"] = _minute(turn)
    found["use"]["quiet"] = use(port)
    found["restart"] = _restart_operator(turn, job_name(count - 1), count)
    found["use"]["restarted"] = use(port)
    turn.side.stop()
    found["training"] = _train(turn, count)
    found["use"]["trained"] = use(port)
    return found


def quiet(turn: Turn, count: int) -> Raw:
    """Create jobs of 4 pods, and let a quiet minute pass."""
    found = turn.create(count, FOUR)
    settle()
    return found | {"quiet": _minute(turn)}


def _minute(turn: Turn) -> Raw:
    """Let a minute pass, and return what the operator and the control plane did in it."""
    with turn.measured() as found:
        time.sleep(SECONDS)
    return {"seconds": SECONDS, **found}


def _train(turn: Turn, count: int) -> Raw:
    """Start the operator anew, let all launchers report a step now and then, and measure a minute of it."""
    operator = turn.nodes.operator
    operator.asks_launchers = True
    with launchers(STATUS_PORT):
        turn.side.start()
        time.sleep(SETTLE_SECONDS * count)
        asked = _asked(turn)
        found = _minute(turn)
        asked = {result: count - asked.get(result, 0) for result, count in _asked(turn).items()}
        now, jobs = datetime.now(UTC), turn.api.items(turn.namespace, "GRPOJob")
    operator.asks_launchers = False
    read = [datetime.fromisoformat(job["status"]["progress"]["time"]) for job in jobs if job["status"].get("progress")]
    age = statistics.median((now - at).total_seconds() for at in read)
    return found | {"asked": asked, "reported": len(read), "age": round(age, 1)}


def _asked(turn: Turn) -> dict[str, float]:
    name = "grpo_operator_progress_requests_total"
    return {one.labels["result"]: one.value for one in samples(turn.nodes.metrics_port) if one.name == name}


def _restart_operator(turn: Turn, edited: str, count: int) -> Raw:
    """Kill the operator, edit a job, start it again; seconds until it has looked at every job and acted on the edit."""
    turn.side.stop()
    log = AuditLog(turn.nodes.plane.audit_log)
    change = {"spec": {"ttlSecondsAfterFinished": 86400}}
    generation = turn.api.patch(turn.namespace, "GRPOJob", edited, change)["metadata"]["generation"]
    begin = time.time()
    turn.side.start()

    def is_level() -> bool:
        try:
            values = list(samples(turn.nodes.metrics_port))
        except OSError:  # it does not serve its metrics yet
            return False
        jobs = sum(one.value for one in values if one.name == "grpo_operator_jobs")
        passes = sum(one.value for one in values if one.name == "grpo_operator_reconcile_duration_seconds_count")
        status = turn.api.request("GET", f"{PATHS['GRPOJob'].format(turn.namespace)}/{edited}")["status"]
        # More than `count`: there is also the first job of the turn.
        return min(jobs, passes) > count and bool(status["observedGeneration"] == generation)

    turn.wait(is_level, "the operator has looked at every job", interval=0.5)
    level = time.time() - begin
    settle()
    after = log.requests(turn.side.user)
    others = [event for event in after if is_write(event) and job_in(event) != edited and resource(event) != "events"]
    attempts = [job["status"]["attempt"] for job in turn.api.items(turn.namespace, "GRPOJob")]
    return {
        "level": round(level, 1),
        "requests": counted(after),
        "writes": len(others),
        "restarts": sum(attempts),
    }
