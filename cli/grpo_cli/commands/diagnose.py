"""The archive of `grpo diagnose`: what a bug report needs, with secrets removed."""

from __future__ import annotations

import importlib.metadata
import io
import platform
import tarfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import urllib3
import yaml
from kubernetes.client.exceptions import ApiException

from grpo_cli.cluster.api_errors import said_by
from grpo_cli.cluster.job_reader import JobReader
from grpo_cli.cluster.kube import Kube, Object
from grpo_cli.cluster.site import read_site
from grpo_cli.commands.redact import redact, redact_text, secrets_in
from grpo_cli.screen.origins import queue_label
from grpo_cli.screen.terminal import console, screen, show
from grpo_operator.api import names
from grpo_operator.api.site import queue_of
from grpo_operator.api.status import read_status
from grpo_spec.words import counted

LOG_BYTES = 5 << 20
"""Bytes of one container's log, from its end."""
LOG_LINES = 50_000
OPERATOR_SELECTOR = f"app.kubernetes.io/name={names.MANAGER}"
NODE_FIELDS = ("capacity", "allocatable", "conditions", "nodeInfo")


def write_archive(kube: Kube, job: str, output: Path | None) -> None:
    """Write the archive of a job to `output`; default: a file in this folder, named after the job and the time."""
    found = kube.job(job)
    collected = Collection()
    collect(kube, found, collected)
    output = output or Path(f"grpo-diagnose-{job}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    output.write_bytes(collected.archive(output.name.removesuffix(".tar.gz")))
    for problem in collected.problems:
        click.echo(f"not collected: {problem}", err=True)
    click.echo(
        f"{output}: {counted(len(collected.files), 'file')}; secrets are removed, but read it before you send it",
        err=True,
    )


class Collection:
    """Files of the archive, and what could not be read."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.problems: list[str] = []
        self._secrets: set[str] = set()

    def add(self, name: str, make: Callable[[], Any]) -> Any:
        """Add and return the text or object that `make` returns; on a failed request note a problem and return None."""
        try:
            made = make()
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            self.problems.append(f"{name}: {said_by(error)}")
            return None
        self._secrets |= set(secrets_in(made))
        is_text = isinstance(made, str)
        self.files[name] = (
            made if is_text else yaml.safe_dump(redact(made), sort_keys=False, allow_unicode=True, width=140)
        )
        return made

    def archive(self, folder: str) -> bytes:
        """Return the files as a tar.gz with one folder; secrets found in one file are removed from all."""
        files = self.files | {"problems.txt": "".join(f"{problem}\n" for problem in self.problems)}
        packed, now = io.BytesIO(), time.time()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, text in sorted(files.items()):
                content = redact_text(text, self._secrets).encode()
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mtime = len(content), int(now)
                archive.addfile(entry, io.BytesIO(content))
        return packed.getvalue()


def collect(kube: Kube, job: Object, into: Collection) -> None:
    """Read everything about a job; a request that fails is noted as a problem."""
    name = job["metadata"]["name"]
    selector = f"{names.LABEL_JOB}={name}"
    into.add("job.yaml", lambda: job)
    into.add("status.txt", lambda: _status(kube, name))
    is_gang = (job["spec"].get("scheduling") or {}).get("gang") is not None
    is_queued = queue_of(queue_label(job), read_status(job.get("status")).site or {}) != ""
    downloads = (job["spec"].get("cache") or {}).get("prefetch")
    optional = {names.GANG_KIND: is_gang, names.QUEUE_KIND: is_queued, "Job": downloads}
    for kind in (*names.CHILD_KINDS, *(kind for kind, is_used in optional.items() if is_used)):
        into.add(f"children/{kind}.yaml", partial(kube.listed, kind, selector))
    pods = into.add("children/Pod.yaml", lambda: kube.listed("Pod", selector)) or []
    into.add("site.yaml", lambda: read_site(kube)[0])
    into.add("claims.yaml", lambda: kube.listed("PersistentVolumeClaim"))
    into.add("events.txt", lambda: _events(kube.listed("Event"), name))
    used = {pod["spec"].get("nodeName") for pod in pods}
    into.add(
        "nodes.yaml",
        lambda: [_node(node) for node in kube.listed_everywhere("Node") if node["metadata"]["name"] in used],
    )
    for pod in pods:
        _add_logs(kube, pod, "logs", into)
    operators = into.add("operator/Pod.yaml", lambda: kube.listed_everywhere("Pod", OPERATOR_SELECTOR)) or []
    into.add("operator/Deployment.yaml", lambda: kube.listed_everywhere("Deployment", OPERATOR_SELECTOR))
    for pod in operators:
        _add_logs(kube, pod, "operator/logs", into)
    into.add("versions.yaml", lambda: _versions(kube, [*pods, *operators]))


def _status(kube: Kube, name: str) -> str:
    *_, view = JobReader(kube, name).read()
    text = io.StringIO()
    show(console(file=text), screen(view))
    return text.getvalue()


def _events(events: list[Object], job: str) -> str:
    """Return one line per event, oldest first, of the job and of objects whose names begin with the job's."""
    shown = []
    for event in events:
        about = event["involvedObject"]
        if about.get("name") == job or str(about.get("name", "")).startswith(f"{job}-"):
            first = event.get("firstTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
            last = event.get("lastTimestamp") or (event.get("series") or {}).get("lastObservedTime") or first
            count = event.get("count") or (event.get("series") or {}).get("count") or 1
            who = f"{about.get('kind')}/{about.get('name')}"
            shown.append(
                f"{last}  x{count}  {event.get('type')}  {event.get('reason')}  {who}  {event.get('message', '')}"
            )
    return "\n".join(sorted(shown)) + "\n"


def _node(node: Object) -> Object:
    status = node.get("status", {})
    spec = {"taints": node.get("spec", {}).get("taints"), "unschedulable": node.get("spec", {}).get("unschedulable")}
    return {
        "name": node["metadata"]["name"],
        "spec": spec,
        "status": {field: status.get(field) for field in NODE_FIELDS},
    }


def _add_logs(kube: Kube, pod: Object, folder: str, into: Collection) -> None:
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    for container in pod.get("status", {}).get("containerStatuses") or ():
        read = partial(_log, kube, name, container["name"], namespace)
        if container.get("restartCount"):
            into.add(f"{folder}/{name}.previous.log", partial(read, previous=True))
        into.add(f"{folder}/{name}.log", read)


def _log(kube: Kube, pod: str, container: str, namespace: str, *, previous: bool = False) -> str:
    log = kube.log(
        pod, container=container, namespace=namespace, previous=previous, tail_lines=LOG_LINES, limit_bytes=LOG_BYTES
    )
    return log.read().decode(errors="replace")


def _versions(kube: Kube, pods: list[Object]) -> Object:
    containers = [container for pod in pods for container in pod.get("status", {}).get("containerStatuses") or ()]
    return {
        "collected": datetime.now(UTC).isoformat(timespec="seconds"),
        "grpo": importlib.metadata.version("grpo-operator"),
        "python": platform.python_version(),
        "kubernetesClient": importlib.metadata.version("kubernetes"),
        "kubernetes": kube.version(),
        "images": {container["image"]: container.get("imageID", "") for container in containers},
    }
