"""Truths of every moment of a simulation, whatever operators see: judged by what the API server holds."""

from collections import Counter

from grpo_operator.api import names
from grpo_operator.api.names import Condition
from grpo_operator.api.status import GRPOJobStatus, read_status
from grpo_operator.api.times import known_time
from grpo_operator.decide.attempts import is_between_attempts
from grpo_operator.decide.conditions import find, is_terminal, keeps_pods, rests
from grpo_operator.decide.objects import controller_of, labels_of
from grpo_spec.reasons import Reason
from support.control_plane.children import job_of
from support.control_plane.memory_api import Request
from support.control_plane.memory_store import Change, Object, Place
from support.control_plane.simulated_cluster import (
    NAMESPACE,
    SimulatedCluster,
    attempt_in,
    is_of_environments,
    is_ready,
)
from support.control_plane.simulated_operator import Pass

_FROZEN = ("attempt", "phase", "restarts", "last_failure", "completion_time", "active_seconds")
_HARMLESS = {Reason.HUNG, Reason.PLACEMENT_TIMEOUT}
"""Failures of an attempt in which nobody ended a pod."""


class Truth:
    """Follows a cluster and notes in `wrong` what should not have happened.

    Tests tell it which pods they harm, which objects belong to no job, and which failures are `possible` besides.

    `outdated`: jobs of which a pass changed a child after another operator had changed the job's course. Two operators
    that both act can do that; it must be mended, not prevented.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster, self._store = cluster, cluster.store
        self.wrong: list[str] = []
        self.harms: Counter[tuple[str, str]] = Counter()
        self.restarts: Counter[tuple[str, str]] = Counter()
        self.foreign: dict[Place, Object] = {}
        self.possible: set[str] = set()
        self.outdated: set[str] = set()
        self._courses: dict[str, object] = {}  # by the job's version
        self._store.listeners.append(self._changed)

    def harm(self, pod: Object, *, says: bool = False) -> None:
        """Note that a test ends a pod. Unless it `says` of which attempt that was, the next one may fail for it too,
        where that begins in the same pods and its launcher does not know of it yet.
        """
        labels, attempt = pod["metadata"]["labels"], attempt_in(pod)
        job = self._cluster.job(labels[names.LABEL_JOB])
        status = read_status(job.get("status") if job else None)
        last = attempt if says or status.attempt is None else status.attempt + keeps_pods(status)
        for one in range(attempt, max(attempt, last) + 1):
            self.harms[labels[names.LABEL_JOB_UID], str(one)] += 1

    def check(self, request: Request, current: Pass) -> None:
        """Judge a request of a pass as it reaches the server."""
        is_write = (
            request.verb in ("apply", "scale", "patch")
            or (request.verb == "delete" and request.kind != names.KIND)
            or (request.verb == "create" and request.kind != "Event")
        )
        if not is_write:
            return
        looks = [one for one in current.requests if one.kind == names.KIND and one.verb in ("get", "update")]
        self._must(looks != [], f"{request} only because of what the mirror shows")
        job = self._cluster.job(looks[0].name) if looks else None
        if job is not None and self._courses.get(current.known or "") == _course(job):
            self._check_child_write(request, job["metadata"]["uid"], read_status(job.get("status")))
        else:
            child = self._store.get(request.kind, NAMESPACE, request.name)
            self.outdated.add(job_of(child or request.params["body"]))

    def _check_child_write(self, request: Request, uid: str, status: GRPOJobStatus) -> None:
        child = self._store.get(request.kind, NAMESPACE, request.name)
        if request.verb == "delete" and (child is None or job_of(child) != uid or not _is_meant(request, child)):
            return  # it is of an earlier job, or no longer there
        runs = status.attempt is not None and not is_terminal(status) and not is_between_attempts(status)
        if request.verb in ("apply", "create"):
            labels = request.params["body"]["metadata"]["labels"]
            attempt = labels.get(names.LABEL_ATTEMPT, str(status.attempt))
            is_contract = request.kind == "ConfigMap"
            wanted = status.attempt if is_contract or names.LABEL_ATTEMPT not in labels else status.created_for
            self._must(runs and attempt == str(wanted), f"{request} of attempt {attempt} is not due")
        elif request.verb == "patch":
            told = request.params["body"]["metadata"]["annotations"][names.ANNOTATION_ATTEMPT]
            is_kept = status.pods_attempt is not None
            self._must(runs and is_kept and told == str(status.attempt), f"{request} announces attempt {told}")
        elif request.verb == "scale":
            self._must(not runs, f"{request} stops an attempt that runs")
            accepted = find(status, Condition.ACCEPTED)
            ends = is_terminal(status) or rests(status) or (accepted is not None and accepted.status == "False")
            is_kept = child is not None and labels_of(child).get(names.LABEL_ROLE) == names.Role.ENVIRONMENT
            self._must(ends or not is_kept, f"{request} takes the environments from the next attempt")
        elif request.kind == "Pod":
            assert child is not None
            self._check_deletion(request, child, status, runs=runs)
        else:
            contract = names.contract_name(request.name.rpartition("-")[0], status.created_for or 0)
            self._must(request.name != contract, f"{request} takes away what the attempt needs")

    def _check_deletion(self, request: Request, pod: Object, status: GRPOJobStatus, *, runs: bool) -> None:
        is_given_up = "deletionTimestamp" in pod["metadata"] and pod["spec"].get("nodeName") in self._cluster.lost
        if is_of_environments(pod):
            ends = is_terminal(status) or rests(status)
            self._must(ends or is_given_up, f"{request} deletes an environment pod")
            return
        member = next((m for m in status.members if m.uid == pod["metadata"]["uid"]), None)
        is_old = not runs or pod["metadata"]["labels"][names.LABEL_ATTEMPT] != str(status.created_for)
        now = known_time(self._store.time())
        is_replaced = member is not None and member.replacing and (member.replace_time or now) <= now
        self._must(is_old or is_given_up or is_replaced, f"{request} deletes a pod of the attempt")

    def _changed(self, change: Change) -> None:
        before, after = change.before, change.after
        there = (before or after or {})["metadata"]
        foreign = self.foreign.get((change.kind, there["namespace"], there["name"]))
        self._must(foreign is None or after == foreign, f"{change.kind} {there['name']}, which is no job's, is changed")
        if change.kind == names.KIND and after is not None:
            self._courses[after["metadata"]["resourceVersion"]] = _course(after)
        if change.kind == names.KIND and before is not None and after is not None:
            self._check_status(after, read_status(before.get("status")), read_status(after.get("status")))
        elif change.kind == "Pod" and after is not None and is_of_environments(after):
            return
        elif change.kind == "Pod" and before is None and after is not None and controller_of(after):
            self._check_new_pod(after)
        elif change.kind == "Pod" and after is not None and is_ready(after):
            self._check_ready_pods(after["metadata"]["labels"][names.LABEL_JOB])

    def _check_ready_pods(self, name: str) -> None:
        """Check that pods that live are of one attempt; those on a lost node can only be fenced off the storage."""
        pods = (pod for pod in self._cluster.pods(job=name) if "deletionTimestamp" not in pod["metadata"])
        attempts = {(job_of(pod), attempt_in(pod)) for pod in pods if is_ready(pod)}
        job = self._cluster.job(name)
        current = job and (job["metadata"]["uid"], read_status(job.get("status")).attempt)
        self._must(len(attempts) <= 1 or current in attempts, f"pods of {attempts} are ready at once")

    def _check_status(self, job: Object, old: GRPOJobStatus, new: GRPOJobStatus) -> None:
        uid, name = job["metadata"]["uid"], job["metadata"]["name"]
        if is_terminal(old):
            changed = [one for one in _FROZEN if getattr(new, one) != getattr(old, one)]
            self._must(not changed, f"{name} has ended, and yet {changed} change")
        if new.attempt != old.attempt:
            self._must(new.attempt == (0 if old.attempt is None else old.attempt + 1), f"{name} skips an attempt")
            pods = self._cluster.pods(job=name)
            kept = [member.uid for member in old.members] if keeps_pods(old) else []
            others = [pod for pod in pods if pod["metadata"]["uid"] not in kept]
            self._must(
                not others or uid in self.outdated, f"attempt {new.attempt} of {name} begins with {_names(others)}"
            )
            self._must(
                not self._of_earlier(job), f"attempt {new.attempt} of {name} begins among an earlier job's objects"
            )
        more = new.restarts.total - old.restarts.total
        if more and uid not in self.outdated:
            self.restarts[uid, str(old.attempt)] += more
            failure = new.last_failure
            # Of a node that was lost when a pod on it had ended, an attempt that begins in that pod shows it.
            harmless = failure is not None and failure.reason in _HARMLESS & self.possible
            if harmless or (failure is not None and failure.node in self._cluster.lost):
                self.harms[uid, str(old.attempt)] += more
            restarts, harms = (counted[uid, str(old.attempt)] for counted in (self.restarts, self.harms))
            engines = any(group.incarnation for group in new.groups)
            self._must(not is_between_attempts(old), f"{name}: a failure of an attempt that has ended is counted")
            self._must(restarts <= harms, f"{name}: {restarts} restarts after {harms} harms: {failure}")
            self._must(restarts == 1 or engines, f"{name}: attempt {old.attempt} fails {restarts} times")

    def _check_new_pod(self, pod: Object) -> None:
        labels = pod["metadata"]["labels"]
        uid, attempt = labels[names.LABEL_JOB_UID], labels[names.LABEL_ATTEMPT]
        job = self._cluster.job(labels[names.LABEL_JOB])
        if job is None or job["metadata"]["uid"] != uid or uid in self.outdated:
            return
        pods = self._cluster.pods(job=labels[names.LABEL_JOB])
        others = [
            pod for pod in pods if (job_of(pod), pod["metadata"]["labels"][names.LABEL_ATTEMPT]) != (uid, attempt)
        ]
        self._must(not others, f"{_names([pod])} of attempt {attempt} runs beside {_names(others)}")

    def _of_earlier(self, job: Object) -> list[Place]:
        return [
            place
            for place, raw in self._store.objects.items()
            if place not in self.foreign
            and raw["metadata"].get("labels", {}).get(names.LABEL_JOB) == job["metadata"]["name"]
            and job_of(raw) != job["metadata"]["uid"]
        ]

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


def _course(job: Object) -> object:
    """Return what another operator must not have changed before a pass changes a child."""
    status = read_status(job.get("status"))
    return job["metadata"]["uid"], job["spec"], status.attempt, is_terminal(status), is_between_attempts(status)


def _is_meant(request: Request, child: Object) -> bool:
    return bool(request.params["body"]["preconditions"]["uid"] == child["metadata"]["uid"])


def _names(pods: list[Object]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]
