"""The journal of a run: each prompt group that it trains on is on the disk before the new weights are pushed.

    <run>/journal/branch-A.N-at-K/      what start N of attempt A wrote after it resumed from the checkpoint of step K
          steps-S/rank-R.jsonl.gz       groups that rank R sampled in steps S, S + 1, ... up to the next checkpoint:
                                        one line per group, one gzip member per step, appended and synced; read by zcat

An attempt writes only into its own branch, so an old attempt that is still alive cannot spoil a newer one's. A step
belongs to the newest branch that begins at or before it. Later steps of older branches were lost with their weights;
they are removed when the next checkpoint is published. Branches begin and files end at checkpoints, so only whole files
are lost.

On the disk a token takes about 11 bytes: 2 for its id, 5.5 for its log-probability (exact float32), the rest for its
text. This module is torch-free.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import IO

from grpo_workload.storage.files import sync
from grpo_workload.storage.group_record import Group, Place, from_line, to_line

_BRANCH = re.compile(r"branch-(\d+)\.(\d+)-at-(\d+)")
_CHUNK = 2**20  # bytes
_GZIP = 31  # zlib's name for gzip members
_LEVEL = 1  # compression level: higher ones take several times as long and save a few percent


@dataclass(frozen=True, slots=True, order=True)
class Branch:
    """The files of one start of the ranks. Branches sort by the order of the starts."""

    attempt: int
    start: int  # number of the start in its attempt: without an operator, ranks can start again with the same contract
    first: int  # first step

    @property
    def name(self) -> str:
        """Name of the branch's folder."""
        return f"branch-{self.attempt}.{self.start}-at-{self.first}"


class Journal:
    """Writes one rank's part of a branch."""

    def __init__(self, run_dir: Path, branch: Branch, rank: int) -> None:
        self._folder = run_dir / "journal"
        self._branch = branch
        self._rank = rank
        self._file: IO[bytes] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: Future[None] | None = None

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Start to append this rank's groups of `step` in a thread, while training goes on; `settle` waits for it.

        A rank writes every step that has groups, also where it has none: the n-th gzip members of all ranks' files are
        one step.
        """
        self.settle()
        self._pending = self._writer.submit(self._append, step, groups)

    def settle(self) -> None:
        """Wait until the groups are on the disk. Raises OSError, which names the file, if it cannot be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _append(self, step: int, groups: Sequence[Group]) -> None:
        member = gzip.compress(b"".join(to_line(group) for group in groups), compresslevel=_LEVEL, mtime=0)
        file = self._file = self._file or self._open(step)
        try:
            file.write(member)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"cannot write the journal of the run: {error.strerror}", file.name) from error

    def begin_part(self) -> None:
        """Begin a new file after a step whose checkpoint is being saved."""
        self._end_file()

    def remove_lost(self) -> None:
        """On rank 0, remove steps that were lost before this branch began; once it has published a checkpoint."""
        if self._rank == 0:
            _remove_lost(self._folder)

    def close(self) -> None:
        """Wait for the last write, and close the file."""
        self._end_file()
        self._writer.shutdown()

    def _end_file(self) -> None:
        self.settle()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, step: int) -> IO[bytes]:
        folder = self._folder / self._branch.name / f"steps-{step}"
        folder.mkdir(exist_ok=True)
        file = (folder / f"rank-{self._rank}.jsonl.gz").open("xb")
        for path in (folder, folder.parent):
            sync(path)
        return file


def begin_branch(run_dir: Path, *, attempt: int, step: int, count: int = 1) -> tuple[Branch, list[Group]]:
    """Begin the branch of an attempt that resumes from the checkpoint of `step`; rank 0 calls it and holds the fence.

    Returns:
        The branch, for the `Journal` of each rank, and those groups of `step`, and of the `count` - 1 steps that are
        sampled with it, that were already journalled under the weights of that same checkpoint.
    """
    folder = run_dir / "journal"
    folder.mkdir(parents=True, exist_ok=True)
    before = _branches(folder)
    start = 1 + max((branch.start for branch in before if branch.attempt == attempt), default=-1)
    branch = Branch(attempt, start, step)
    (folder / branch.name).mkdir()
    sync(folder)
    return branch, _known(folder, before, step, count)


def read_lineage(run_dir: Path) -> Iterator[list[Group]]:
    """Yield, for each step that led to the newest weights, its groups in the order of their prompts.

    Steps that train on groups of earlier steps once more (training.numIterations) have none of their own.
    Ends before the first incomplete step, which a run is writing or was writing when it was killed, and before steps
    that a run removes meanwhile, as it lost their weights. For a run that continues another one (storage.resumeFrom),
    only its own steps are included.
    """
    folder = run_dir / "journal"
    with suppress(FileNotFoundError):
        for branch, stop in _lineage(_branches(folder)):
            for part in _parts(folder / branch.name):
                for groups in _steps(part):
                    if groups[0].step >= (stop or groups[0].step + 1):
                        break
                    if len(groups) != groups[0].num_prompts:
                        return
                    yield groups


def _known(folder: Path, branches: Sequence[Branch], step: int, count: int) -> list[Group]:
    """Return the groups of `count` steps from the branch that saved the first's checkpoint, and from those that resumed
    from it.
    """
    found: dict[Place, Group] = {}
    for branch in reversed(branches):
        part = folder / branch.name / f"steps-{step}"
        steps = islice(_steps(part), count) if part.is_dir() else ()
        groups = [group for of_step in steps for group in of_step]
        found = {group.place: group for group in groups if max(group.weight_versions) <= step} | found
        if branch.first < step:
            break  # this branch saved the checkpoint; older branches may have saved a different one for this step
    return [found[place] for place in sorted(found)]


def _branches(folder: Path) -> list[Branch]:
    """Return all branches of a journal, oldest first."""
    matches = [match for path in folder.glob("branch-*") if (match := _BRANCH.fullmatch(path.name))]
    return sorted(Branch(*map(int, match.groups())) for match in matches)


def _lineage(branches: Sequence[Branch]) -> list[tuple[Branch, int | None]]:
    """Return the branches that led to the newest weights, oldest first, each with the step where the next begins."""
    kept: list[tuple[Branch, int | None]] = []
    stop: int | None = None
    for branch in reversed(branches):
        if stop is None or branch.first < stop:
            kept.append((branch, stop))
            stop = branch.first
    return kept[::-1]


def _remove_lost(folder: Path) -> None:
    branches = _branches(folder)
    stops = dict(_lineage(branches))
    for branch in branches:
        stop = stops.get(branch, 0)
        # A file that another client holds open cannot be deleted yet; it is deleted after the next checkpoint.
        with suppress(FileNotFoundError):
            for part in _parts(folder / branch.name):
                if stop is not None and _first_step(part) >= stop:
                    shutil.rmtree(part, ignore_errors=True)
        if branch not in stops:
            shutil.rmtree(folder / branch.name, ignore_errors=True)


def _parts(branch: Path) -> list[Path]:
    """Return the branch's parts, oldest first. Raises FileNotFoundError if it was removed."""
    return sorted((path for path in branch.iterdir() if path.name.startswith("steps-")), key=_first_step)


def _first_step(part: Path) -> int:
    return int(part.name.removeprefix("steps-"))


def _steps(part: Path) -> Iterator[list[Group]]:
    """Yield the groups of each step, from the files of all ranks; the last step may be incomplete.

    Raises FileNotFoundError if the part was removed.
    """
    with ExitStack() as files:
        # `iterdir`, unlike `glob`, raises if the folder is gone.
        paths = sorted(path for path in part.iterdir() if path.name.startswith("rank-"))
        ranks = [_members(files.enter_context(path.open("rb"))) for path in paths]
        for members in zip_longest(*ranks, fillvalue=b""):
            groups = [from_line(line) for member in members for line in member.splitlines()]
            if groups:
                yield sorted(groups, key=lambda group: group.position)


def _members(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the gzip members of a file; skip the last one if its writer was killed while it wrote it."""
    member, whole = zlib.decompressobj(_GZIP), bytearray()
    rest = b""
    while chunk := rest or file.read(_CHUNK):
        whole += member.decompress(chunk)
        rest = member.unused_data
        if member.eof:
            yield bytes(whole)
            member, whole = zlib.decompressobj(_GZIP), bytearray()
