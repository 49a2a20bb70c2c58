"""`grpo cp` and `grpo export`: files between this machine and a claim."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grpo_cli.commands.options import job_argument, on_cluster
from grpo_cli.errors import CliError, Exit
from grpo_spec.words import counted

if TYPE_CHECKING:
    from grpo_cli.cluster.copying.transfer import Side
    from grpo_cli.cluster.kube import Kube, Object

_CLAIM = re.compile(r"([a-z0-9][a-z0-9.-]*):(.*)", re.DOTALL)
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_CURES = {
    errno.EACCES: "the pod's user, that of the jobs, may not: change the owner or the mode of the folder, or set "
    "podTemplate.securityContext.fsGroup in the job",
    errno.EPERM: "the volume does not let the pod's user change it",
    errno.EROFS: "the claim is mounted to be read only",
    errno.ENOSPC: "delete what is not needed, or enlarge the claim: the same command goes on where it was",
    errno.EDQUOT: "delete what is not needed, or raise the quota: the same command goes on where it was",
}

image_option = click.option("--image", help="Image of the pod that copies, with Python; default: the image of jobs.")


@dataclass(frozen=True)
class Place:
    """One end of a copy: a path on this machine, or below a claim."""

    claim: str | None
    path: str

    @classmethod
    def read(cls, text: str) -> Place:
        """Read CLAIM:PATH, or a path of this machine (./a:b where it looks like one of a claim)."""
        found = _CLAIM.fullmatch(text)
        return cls(found[1], found[2].lstrip("/")) if found else cls(None, text)

    def __str__(self) -> str:
        return self.path if self.claim is None else f"{self.claim}:{self.path}"


def ends(source: str, target: str) -> tuple[Place, Place]:
    """Return source and target, of which one is a claim's. Raises CliError."""
    places = Place.read(source), Place.read(target)
    if sum(place.claim is not None for place in places) != 1:
        raise CliError(
            f"one of {source} and {target} must be CLAIM:PATH, and the other a path of this machine", Exit.INVALID
        )
    return places


@click.command()
@click.argument("source")
@click.argument("target")
@image_option
@on_cluster
def cp(kube: Kube, source: str, target: str, image: str | None) -> None:
    """Copy a file or folder between this machine and a claim.

    One of SOURCE and TARGET is CLAIM:PATH, a path on the volume of a PersistentVolumeClaim. A file goes into a TARGET
    that is a folder or ends with /; of a folder the content does. A short-lived pod, with the user of the jobs' pods,
    mounts the claim. Each part is compared by its SHA-256; the same command again goes on where it was interrupted, and
    copies only what differs.
    """
    copy_files(kube, *ends(source, target), image=image)


@click.command("export")
@job_argument
@click.argument("folder")
@image_option
@on_cluster
def export(kube: Kube, job: str, folder: str, image: str | None) -> None:
    """Fetch the newest exported model of JOB.

    Its files go into FOLDER, from which from_pretrained loads it. Jobs export models where storage.export says so. The
    model card says what the job has cost until now.
    """
    found = kube.job(job)
    copy_files(kube, exported(found), Place(None, folder), image=image, job=found)
    add_bill(Path(folder), found)


def add_bill(folder: Path, job: Object) -> None:
    """Write into the model card, and its manifest, how long the job has held GPUs, priced where the site says."""
    from grpo_cli.screen.bill import describe_usage
    from grpo_operator.api.site import price_of
    from grpo_operator.api.status import read_status

    status = read_status(job.get("status"))
    card, manifest = folder / "README.md", folder / "manifest.json"
    bill = describe_usage(status.usage, price_of(status.site or {}))
    if not (bill and card.exists() and manifest.exists()):
        return
    text = f"{card.read_text().rstrip()}\n\nWhen this was fetched, the job had held GPUs for {bill}.\n".encode()
    sealed = json.loads(manifest.read_text())
    sealed["files"][card.name] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    card.write_bytes(text)
    manifest.write_text(json.dumps(sealed, indent=1))


def exported(job: Object) -> Place:
    """Return the newest exported model of a job. Raises CliError saying why there is none."""
    from grpo_operator.api.status import read_status
    from grpo_spec.lenient import mapping

    status, name, storage = read_status(job.get("status")), job["metadata"]["name"], mapping(job["spec"].get("storage"))
    claim, sub_path = storage.get("claimName"), storage.get("subPath", "")
    if not claim:
        why = "without storage.claimName a model is deleted with its pod"
    elif status.export is not None:
        return Place(claim, f"{sub_path}/{status.export.path}".lstrip("/"))
    else:
        every = mapping(storage.get("export")).get("everySteps")
        why = f"its phase is {status.phase}"
        why += f", and it exports every {every} steps and at its end" if every else "; it does not set storage.export"
        if status.checkpoint:
            path = f"{sub_path}/{status.checkpoint}/model".lstrip("/")
            why += f"; its newest checkpoint has a model, too: grpo cp {claim}:{path} FOLDER"
    raise CliError(f"job {name} has exported no model: {why}", Exit.NOT_FOUND)


def copy_files(kube: Kube, source: Place, target: Place, *, image: str | None, job: Object | None = None) -> None:
    """Copy with progress on standard error. Raises CliError, ApiException."""
    from grpo_cli.cluster.copying import transfer
    from grpo_cli.cluster.copying.folder import Folder
    from grpo_cli.cluster.copying.served_claim import served

    claim = source.claim or target.claim
    assert claim is not None
    here = Folder(Path.cwd().anchor)
    with _ends_by_signals(), _explained(claim):
        if source.claim is None:
            _found(here, source, _absolute(source.path))  # before a pod is started
        with served(kube, claim, _say, image=image, job=job) as there:
            one, other = (there, here) if target.claim is None else (here, there)
            path = source.path if source.claim else _absolute(source.path)
            wanted = target.path if target.claim else _absolute(target.path)
            found = _found(one, source, path)
            to = transfer.place(found, path, other.kind(wanted), wanted)
            with _progress(sum(found["files"].values())) as done:
                transfer.copy(one, path, other, to, done, found)
    size, number = sum(found["files"].values()), len(found["files"])
    where = f"{claim}:{to}" if target.claim else f"/{to}" if os.sep == "/" else target.path
    _say(f"{counted(number, 'file')}, {size:,} bytes: {source} is at {where}")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _absolute(path: str) -> str:
    """Return a path of this machine below its root; a / at the end stays, as it says that this is a folder."""
    whole = Path(os.path.abspath(path))
    return whole.relative_to(whole.anchor).as_posix() + "/" * path.endswith(("/", os.sep))


def _found(side: Side, place: Place, path: str) -> dict[str, Any]:
    """Return what is at a path. Raises CliError if nothing is, naming what is near."""
    found = side.look(path)
    if found["kind"] != "none":
        return found
    above, there = found["near"]
    listed = ", ".join(there) or "nothing"
    where = "its root" if above == "." and place.claim else above if place.claim else f"/{above}"
    raise CliError(f"there is no {place}; {where} has {listed}", Exit.NOT_FOUND)


@contextmanager
def _explained(claim: str) -> Iterator[None]:
    """Turn failures to read, write or send a file into a CliError."""
    from grpo_cli.cluster.copying.remote_folder import ClaimError
    from grpo_cli.cluster.copying.transfer import NotCopiedError
    from grpo_cli.cluster.pod_http import NotAllowedError, PodError

    try:
        yield
    except NotAllowedError as error:
        raise CliError(str(error), Exit.UNREACHABLE) from error
    except PodError as error:
        raise CliError(f"{error}; the same command goes on where it was", Exit.UNREACHABLE) from error
    except NotCopiedError as error:
        raise CliError(f"{error}: copy again", Exit.FAILED) from error
    except OSError as error:
        side = f"claim {claim}" if isinstance(error, ClaimError) else "this machine"
        cure = _CURES.get(error.errno or 0, "") if isinstance(error, ClaimError) else ""
        said = f"{side}: {error.filename or ''}: {error.strerror or error}"
        raise CliError(f"{said}; {cure}" if cure else said, Exit.FAILED) from error


@contextmanager
def _ends_by_signals() -> Iterator[None]:
    """Let a signal that ends this process delete the pod first, as Ctrl-C does."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(size: int) -> Iterator[Callable[[int, bool], None]]:
    """Show how many of `size` bytes are copied, and how many were there, while a terminal is on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    was_there = 0
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=size)

        def done(number: int, is_there: bool) -> None:
            nonlocal was_there
            was_there += number * is_there
            bar.update(task, advance=number, description=f"{was_there:,} were there" if was_there else "")

        yield done
        bar.update(task, completed=size)
    if was_there:
        _say(f"{was_there:,} of {size:,} bytes were there already")
