"""The logs of a job's pods as one stream, for `grpo logs`."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import urllib3
from kubernetes.client.exceptions import ApiException
from rich.text import Text

from grpo_cli.cluster.api_errors import said_by
from grpo_cli.cluster.kube import Kube, Object
from grpo_cli.errors import CliError, Exit
from grpo_cli.screen.log_lines import Line, merged, read_line
from grpo_cli.screen.pods import ranks_of
from grpo_cli.screen.terminal import console
from grpo_cli.screen.view import read_topology
from grpo_cli.screen.words import ranges
from grpo_cli.ui.finished import fetch, is_away, is_log
from grpo_cli.ui.folder import kept_logs
from grpo_operator.api import names
from grpo_operator.api.status import read_status
from grpo_operator.decide.conditions import is_terminal
from grpo_operator.decide.observed_pod import read_pod

COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "red")
POLL_SECONDS = 2.0
ROLES = {"trainer": names.Role.TRAINER, "engine": names.Role.GENERATION, "environment": names.Role.ENVIRONMENT}


def print_logs(kube: Kube, job: str, *, rank: int | None, role: str | None, tail: int | None, previous: bool) -> None:
    """Print the present logs, merged by time. Raises CliError when there is none."""
    found = kube.job(job)
    wanted = _Wanted(found, rank, role)
    out = console()
    pods = wanted.of(kube.pods(found))
    if not pods and rank is None and role in (None, "trainer") and _print_kept(kube, found, tail):
        return
    if not pods:
        raise _no_pods(found, role)
    read = [each for pod in pods for each in _whole_log(kube, pod, tail, previous=previous)]
    colours = _Colours()
    for line in merged([log for log in read if isinstance(log, list)]):
        if wanted.line(line):
            out.print(colours.render(line), soft_wrap=True)
    problems = [each for each in read if isinstance(each, str)]
    for problem in problems:
        click.echo(problem, err=True)
    if problems and len(problems) == len(read):
        raise CliError("no pod has a log: see the reasons above", Exit.NOT_FOUND)


def _print_kept(kube: Kube, job: Object, tail: int | None) -> bool:
    """Print the ends of logs that a job whose pods are gone has kept on its claim; return whether there were any."""
    with tempfile.TemporaryDirectory(prefix="grpo-logs-") as there:
        folder = Path(there)
        if not is_away(kube, job) or not fetch(kube, job, folder, lambda said: click.echo(said, err=True), is_log):
            return False
        colours, out = _Colours(), console()
        for pod, text in kept_logs(folder).items():
            for line in deque(text.splitlines(), maxlen=tail):
                out.print(colours.render(Line("", pod, line)), soft_wrap=True)
        return True


class _Wanted:
    """The pods and lines that --rank and --role choose."""

    def __init__(self, job: Object, rank: int | None, role: str | None) -> None:
        self._rank, self._role = rank, role
        topology = read_topology(job)
        self._pod = None
        if rank is not None:
            ranks = ranks_of(topology) if topology else {}
            self._pod = next((pod for pod, own in ranks.items() if rank in own), None)
            if self._pod is None:
                known = ranges(each for own in ranks.values() for each in own) or "none"
                name = job["metadata"]["name"]
                raise CliError(f"job {name} has no rank {rank}; it has {known}", Exit.NOT_FOUND)

    def of(self, pods: Sequence[Object]) -> list[Object]:
        return [
            pod
            for pod in pods
            if self._pod in (None, pod["metadata"]["name"])
            and (self._role is None or pod["metadata"]["labels"].get(names.LABEL_ROLE) == ROLES[self._role])
        ]

    def line(self, line: Line) -> bool:
        return self._rank is None or line.rank == self._rank


class _Colours:
    """A colour for each pod, in the order in which pods appear."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def render(self, line: Line) -> Text:
        colour = self._of.setdefault(line.pod, COLOURS[len(self._of) % len(COLOURS)])
        return Text.assemble((f"{line.pod} | ", colour), line.text)


def _whole_log(kube: Kube, pod: Object, tail: int | None, *, previous: bool) -> Iterator[list[Line] | str]:
    """Yield the log of the container that ended, if one did, and of the one that runs; or why there is none.

    A container that runs after one that ended only holds its result; its log is nearly empty.
    """
    name = pod["metadata"]["name"]
    restarted = read_pod(pod).restarts > 0
    if previous and not restarted:
        return
    for is_previous in [True] * restarted + [False] * (not previous):
        try:
            yield list(_lines(kube, name, tail=tail, previous=is_previous))
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            yield f"{name}: no log{' of the container that ended' if is_previous else ''}: {said_by(error)}"


def _lines(
    kube: Kube, pod: str, *, tail: int | None = None, previous: bool = False, follow: bool = False
) -> Iterator[Line]:
    answer = kube.log(pod, timestamps=True, previous=previous, follow=follow, tail_lines=tail)
    try:
        line, rest = None, b""
        for chunk in answer.stream():
            *whole, rest = (rest + chunk).split(b"\n")
            for raw in whole:
                line = read_line(pod, raw.decode(errors="replace"), line)
                yield line
        if rest:
            yield read_line(pod, rest.decode(errors="replace"), line)
    finally:
        answer.release_conn()


def follow_logs(kube: Kube, name: str, *, rank: int | None, role: str | None, tail: int | None) -> None:
    """Print lines as they come, of the present pods and of those that replace them, until the job has ended."""
    wanted, out = _Wanted(kube.job(name), rank, role), console()
    lines: queue.Queue[Line] = queue.Queue()
    readers: dict[tuple[str, int], threading.Thread] = {}
    colours = _Colours()
    while True:
        job = kube.job(name)
        ended = is_terminal(read_status(job.get("status")))
        for pod in wanted.of(kube.pods(job)):
            seen = read_pod(pod)
            key = (seen.uid, seen.restarts)
            is_up = pod.get("status", {}).get("phase") == "Running" and seen.waiting is None
            if is_up and key not in readers:
                first = not any(uid == seen.uid for uid, _ in readers)
                readers[key] = threading.Thread(
                    target=_pump, args=(kube, seen.name, tail if first else None, lines), daemon=True
                )
                readers[key].start()
        next_poll = time.monotonic() + POLL_SECONDS
        while (wait := next_poll - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=wait)
                if wanted.line(line):
                    out.print(colours.render(line), soft_wrap=True)
        if ended and lines.empty() and not any(reader.is_alive() for reader in readers.values()):
            break
    if not readers:
        raise _no_pods(job, None)


def _pump(kube: Kube, pod: str, tail: int | None, lines: queue.Queue[Line]) -> None:
    try:
        for line in _lines(kube, pod, tail=tail, follow=True):
            lines.put(line)
    except (ApiException, urllib3.exceptions.HTTPError) as error:
        click.echo(f"{pod}: reading its log stopped: {said_by(error)}", err=True)


def _no_pods(job: Object, role: str | None) -> CliError:
    status, name = read_status(job.get("status")), job["metadata"]["name"]
    if role == "engine" and not any(group.role == names.Role.GENERATION for group in status.groups):
        return CliError(
            f"job {name} has no engine pods: engines run in the trainer pods; use --role trainer", Exit.NOT_FOUND
        )
    if role == "environment" and not any(group.role == names.Role.ENVIRONMENT for group in status.groups):
        return CliError(
            f"job {name} has no environment pods: tools and environments run beside each rank; use --role trainer",
            Exit.NOT_FOUND,
        )
    failure = "; `grpo status` shows the last lines of the failed pod" if status.last_failure else ""
    return CliError(
        f"job {name} is {status.phase} and has no pods; logs are deleted with their pods{failure}", Exit.NOT_FOUND
    )
