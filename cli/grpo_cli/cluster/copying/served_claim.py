"""Starts the pod that mounts a claim, says why it does not start, and deletes it in any case."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import urllib3
from kubernetes.client.exceptions import ApiException

from grpo_cli.cluster.copying.copy_pod import PORT, SELECTOR, copy_pod, holder_of, job_of, like_job
from grpo_cli.cluster.copying.remote_folder import RemoteFolder
from grpo_cli.cluster.kube import Kube, Object
from grpo_cli.cluster.pod_http import ForwardedConnection
from grpo_cli.errors import NEAR_NAMES, CliError, Exit
from grpo_cli.screen.pods import why_not_ready_yet
from grpo_cli.screen.view import read_job
from grpo_cli.screen.words import since
from grpo_operator.decide.observed_pod import read_pod

START_SECONDS = 1200
"""Stop waiting for the pod to start after this time: pulling a large image takes minutes."""
ANSWER_SECONDS = 60.0
"""Time for a part of a file to pass."""
POLL_SECONDS = 1.0
HOPELESS = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")

Say = Callable[[str], None]


@contextmanager
def served(kube: Kube, name: str, say: Say, *, image: str | None, job: Object | None = None) -> Iterator[RemoteFolder]:
    """Serve a claim by a pod that runs as those of `job`, else of the newest job with the claim; delete it in the end.

    Raises CliError if there is no such claim or the pod does not start; ApiException, also where it is refused.
    """
    claim = _claim(kube, name)
    holder = holder_of(claim, kube.listed("Pod"))
    if holder is not None and "ReadWriteOncePod" in claim["spec"]["accessModes"]:
        raise CliError(
            f"claim {name} is ReadWriteOncePod and pod {holder['metadata']['name']} has it: wait until that has ended",
            Exit.INVALID,
        )
    _sweep(kube)
    job = job or job_of(name, _jobs(kube))
    like = None if job is None else like_job(read_job(job))
    pod = kube.create("Pod", copy_pod(name, like, image, holder))["metadata"]["name"]
    try:
        held = f"; claim {name} is ReadWriteOnce, and pod {holder['metadata']['name']} has it there" if holder else ""
        _wait(kube, pod, say, held)
        folder = RemoteFolder(
            lambda: ForwardedConnection(kube.api, kube.namespace, pod, PORT, seconds=ANSWER_SECONDS),
            lambda: _check(kube, pod),
        )
        try:
            yield folder
        finally:
            folder.close()
    finally:
        kube.delete("Pod", pod)


def _claim(kube: Kube, name: str) -> Object:
    try:
        return kube.named("PersistentVolumeClaim", name)
    except ApiException as error:
        if error.status != 404:
            raise
        there = sorted(claim["metadata"]["name"] for claim in kube.listed("PersistentVolumeClaim"))
        near = difflib.get_close_matches(name, there, n=NEAR_NAMES) or there[:NEAR_NAMES]
        fix = f"there is {', '.join(near)}" if near else "it has none: create one, or use another --namespace"
        raise CliError(
            f"no PersistentVolumeClaim {name} in namespace {kube.namespace}; {fix}", Exit.NOT_FOUND
        ) from error


def _jobs(kube: Kube) -> list[Object]:
    try:
        return kube.jobs()
    except (CliError, ApiException):  # a claim may be filled before the operator is there, or by who may see no jobs
        return []


def _sweep(kube: Kube) -> None:
    """Delete the pods of copies whose machine was switched off: those that have ended, or that never began."""
    for pod in kube.listed("Pod", SELECTOR):
        age = since(pod["metadata"]["creationTimestamp"], datetime.now(UTC)) or 0.0
        phase = pod["status"].get("phase")
        if phase in ("Succeeded", "Failed") or (phase == "Pending" and age > 2 * START_SECONDS):
            kube.delete("Pod", pod["metadata"]["name"])


def _wait(kube: Kube, name: str, say: Say, held: str) -> None:
    said, until = "", time.monotonic() + START_SECONDS
    while True:
        pod = kube.named("Pod", name)
        if pod["status"].get("phase") == "Running":
            return
        seen, cause = read_pod(pod), _why_not_running(kube, pod)
        if seen.endings or cause.startswith(HOPELESS):
            told = f": {seen.endings[0].outcome.message}" if seen.endings else ""
            raise CliError(f"pod {name} did not start: {cause}{told}{held}", Exit.INVALID)
        if time.monotonic() > until:
            raise CliError(f"pod {name} has not started in {START_SECONDS // 60} minutes: {cause}{held}", Exit.DEADLINE)
        if cause != said:
            say(f"pod {name}: {cause}{held}")
            said = cause
        time.sleep(POLL_SECONDS)


def _why_not_running(kube: Kube, pod: Object) -> str:
    """Return why a pod has not started: what its status says, or for volumes, of which that says nothing, an event."""
    cause = why_not_ready_yet(read_pod(pod), pod)
    if not cause.startswith("ContainerCreating"):
        return cause
    try:
        events = kube.listed("Event")
    except ApiException as error:
        if error.status == 403:
            return cause
        raise
    own = [e for e in events if e["involvedObject"].get("uid") == pod["metadata"]["uid"] and e["type"] == "Warning"]
    newest = max(own, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime")), default=None)
    return f"{newest['reason']}: {newest['message']}" if newest else cause


def _check(kube: Kube, name: str) -> None:
    """Raise CliError if a pod that has served cannot any more."""
    try:
        pod = kube.named("Pod", name)
    except urllib3.exceptions.HTTPError:
        return  # the API server may come back
    except ApiException as error:
        if error.status != 404:
            return
        raise CliError(f"pod {name} was deleted: the same command goes on where it was", Exit.UNREACHABLE) from error
    if cause := _end_of(pod):
        raise CliError(f"pod {name} {cause}: the same command goes on where it was", Exit.UNREACHABLE)


def _end_of(pod: Object) -> str:
    seen = read_pod(pod)
    return why_not_ready_yet(seen, pod) if seen.endings or seen.disruption or seen.deletion_time else ""
