"""What the operator takes when there are many jobs: memory, requests of a quiet minute, the time after a restart."""

from __future__ import annotations

import time

from benchmarks.control_plane.manifests import job_name
from benchmarks.control_plane.observer import AuditLog, Processors, counted, is_write, resource, samples, use
from benchmarks.control_plane.scenarios import FOUR, job_in
from benchmarks.control_plane.turn import Raw, Turn, settle
from grpo_operator.api.names import PATHS

QUIET_SECONDS = 60


def large(turn: Turn, count: int) -> Raw:
    """Create jobs of 4 pods, let a quiet minute pass, and kill the operator and start it again."""
    port = turn.nodes.metrics_port
    found = turn.create(count, FOUR)
    settle()
    found["use"] = {"running": use(port)}
    log, processors = AuditLog(turn.nodes.plane.audit_log), Processors()
    time.sleep(QUIET_SECONDS)
    found["use"]["quiet"] = use(port)
    quiet = log.requests(turn.side.user)
    found["quiet"] = {
        "seconds": QUIET_SECONDS,
        "requests": counted(quiet),
        "writes": sum(map(is_write, quiet)),
        "busy": round(processors.busy(), 3),
    }
    found["restart"] = _restart_operator(turn, job_name(count - 1), count)
    found["use"]["restarted"] = use(port)
    return found


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
