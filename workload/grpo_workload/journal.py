"""The journal of a run: every group of completions that a step was trained on, on the disk before its weights go anywhere. Torch-free.

    <run>/journal/branch-E.A-at-K/      what attempt A of epoch E wrote after it went on from the checkpoint of step K
          steps-S/rank-R.jsonl.gz       steps S, S + 1, ... up to the next checkpoint, as rank R sampled them: a line a group, a gzip
                                        member a step, appended and synced (`zcat` reads it)

An attempt writes into its own branch only, so one that was given up on but lives cannot spoil another's. Branches follow each other, and
the newest that begins at or before a step holds it: what an older branch has after that belongs to steps that were lost with their
weights, and is removed when the next checkpoint is there. Branches begin and files end at checkpoints, so that only whole files are lost.

On the disk a token takes about 11 bytes: 2 for its id, 5.5 for its log-probability (float32, exactly), the rest for its text.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO

from grpo_workload.files import sync
from grpo_workload.group import Group, from_line, to_line

_BRANCH = re.compile(r"branch-(\d+)\.(\d+)-at-(\d+)")
_CHUNK = 2**20  # bytes
_GZIP = 31  # zlib's name for gzip members
_LEVEL = 1  # of compression: higher ones take several times as long for a few percent


@dataclass(frozen=True, slots=True, order=True)
class Branch:
    """What one attempt wrote; in the order in which attempts follow each other."""

    epoch: int
    attempt: int
    first: int  # step

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"branch-{self.epoch}.{self.attempt}-at-{self.first}"


class Journal:
    """One rank's part of a branch, to write."""

    def __init__(self, run_dir: Path, branch: Branch, rank: int) -> None:
        self._folder = run_dir / "journal"
        self._branch = branch
        self._rank = rank
        self._file: IO[bytes] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: Future[None] | None = None

    def write(self, groups: Sequence[Group]) -> None:
        """Begin to append this rank's groups of a step, which are not changed any more: the device can be given its work meanwhile."""
        self.settle()
        self._pending = self._writer.submit(self._append, groups)

    def settle(self) -> None:
        """Wait until what was given to `write` is on the disk. OSError naming the file where it does not fit."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _append(self, groups: Sequence[Group]) -> None:
        member = gzip.compress(b"".join(to_line(group) for group in groups), compresslevel=_LEVEL, mtime=0)
        file = self._file = self._file or self._open(groups[0].step)
        try:
            file.write(member)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"cannot write the journal of the run: {error.strerror}", file.name) from error

    def begin_part(self) -> None:
        """A checkpoint is published: what comes goes to another file. Rank 0 removes what was lost before the branch began."""
        self._end_file()
        if self._rank == 0:
            _remove_lost(self._folder)

    def close(self) -> None:
        """Nothing more to write."""
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


def begin_branch(run_dir: Path, *, epoch: int, step: int) -> tuple[Branch, list[Group]]:
    """Begin the branch of an attempt that goes on from the checkpoint of `step`; for rank 0, when it holds the run's claim.

    Returns:
        The branch, for the `Journal` of each rank, and the groups of `step` that were journalled before under the weights of that very
        checkpoint: all of them, a part, or none.
    """
    folder = run_dir / "journal"
    folder.mkdir(parents=True, exist_ok=True)
    before = _branches(folder)
    attempt = 1 + max((branch.attempt for branch in before if branch.epoch == epoch), default=-1)
    branch = Branch(epoch, attempt, step)
    (folder / branch.name).mkdir()
    sync(folder)
    return branch, _known(folder, before, step)


def read_lineage(run_dir: Path) -> Iterator[list[Group]]:
    """The groups of each step that led to the newest weights, in order, one list a step: its groups in the order of their prompts.

    Ends before the first step that is not complete: the one that a living run is writing, or that a killed one was. A run that continues
    another (storage.resumeFrom) has its own steps alone.
    """
    folder = run_dir / "journal"
    for branch, stop in _lineage(_branches(folder)):
        for part in _parts(folder / branch.name):
            for groups in _steps(part):
                if groups[0].step >= (stop or groups[0].step + 1):
                    break
                if len(groups) != groups[0].num_prompts:
                    return
                yield groups


def _known(folder: Path, branches: Sequence[Branch], step: int) -> list[Group]:
    """Groups of `step`: its branch's, and before that those of attempts that went on from the same checkpoint."""
    found: dict[int, Group] = {}
    for branch in reversed(branches):
        if branch.first > step:
            continue  # an attempt from a newer checkpoint, which turned out to be damaged
        groups = next(_steps(folder / branch.name / f"steps-{step}"), [])
        found = {group.position: group for group in groups if group.weight_versions == {step}} | found
        if branch.first < step:
            break  # it took the checkpoint; older branches may have saved another one of that step
    return [found[position] for position in sorted(found)]


def _branches(folder: Path) -> list[Branch]:
    """All of a journal, oldest first."""
    matches = [match for path in folder.glob("branch-*") if (match := _BRANCH.fullmatch(path.name))]
    return sorted(Branch(*map(int, match.groups())) for match in matches)


def _lineage(branches: Sequence[Branch]) -> list[tuple[Branch, int | None]]:
    """The branches that hold steps of the newest weights, oldest first, each with the step at which the next one takes over."""
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
        # A file that another client holds open cannot go yet: it goes after the next checkpoint.
        for part in _parts(folder / branch.name):
            if stop is not None and _first_step(part) >= stop:
                shutil.rmtree(part, ignore_errors=True)
        if branch not in stops:
            shutil.rmtree(folder / branch.name, ignore_errors=True)


def _parts(branch: Path) -> list[Path]:
    return sorted(branch.glob("steps-*"), key=_first_step)


def _first_step(part: Path) -> int:
    return int(part.name.removeprefix("steps-"))


def _steps(part: Path) -> Iterator[list[Group]]:
    """The steps in the files of all ranks together; the last one may lack groups."""
    with ExitStack() as files:
        ranks = [_members(files.enter_context(path.open("rb"))) for path in sorted(part.glob("rank-*"))]
        for members in zip_longest(*ranks, fillvalue=b""):
            groups = [from_line(line) for member in members for line in member.splitlines()]
            if groups:
                yield sorted(groups, key=lambda group: group.position)


def _members(file: IO[bytes]) -> Iterator[bytes]:
    """The gzip members of a file, one at a time; the last one is left out where its writer was killed in it."""
    member, whole = zlib.decompressobj(_GZIP), bytearray()
    rest = b""
    while chunk := rest or file.read(_CHUNK):
        whole += member.decompress(chunk)
        rest = member.unused_data
        if member.eof:
            yield bytes(whole)
            member, whole = zlib.decompressobj(_GZIP), bytearray()
