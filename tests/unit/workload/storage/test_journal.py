"""The journal has every step of the newest weights once, whatever attempts do and wherever they are killed."""

import errno
import gzip
import math
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_workload.algorithm.samples import Completion, Episode, Fork
from grpo_workload.storage.group_record import Group, from_line, to_line
from grpo_workload.storage.journal import Journal, begin_branch, read_lineage

PROMPTS = 3


def make_group(step: int, position: int, *, text: str = "", tokens: int = 2) -> Group:
    draw = random.Random(f"{step} {position} {text}")
    ids = tuple(draw.randrange(150_000) for _ in range(tokens))
    logprobs = tuple(float(np.float32(math.log(draw.random()))) for _ in range(tokens))
    completion = Completion(token_ids=ids, logprobs=logprobs, text=text, finish_reason="length", weight_version=step)
    return Group(
        step=step,
        position=position,
        slot=position,
        num_prompts=PROMPTS,
        prompt_index=10 * position,
        prompt_ids=(1, 2, 3),
        completions=(completion,) * 2,
        rewards={"r": [0.5, None]},
        extra={"r": {"note": [text, position]}},
    )


class Attempt:
    """The ranks of one attempt, each with its share of the prompts."""

    def __init__(self, run_dir: Path, name: str, *, attempt: int, step: int, ranks: int) -> None:
        self.branch, self.known = begin_branch(run_dir, attempt=attempt, step=step)
        self.journals = [Journal(run_dir, self.branch, rank) for rank in range(ranks)]
        self.step, self.name = step, name

    def write(self, ranks: int | None = None) -> list[Group]:
        """Journal a step; if it is killed, only its first `ranks` ranks have written."""
        known = {group.position: group for group in self.known}
        groups = [known.get(position) or make_group(self.step, position, text=self.name) for position in range(PROMPTS)]
        for rank, journal in list(enumerate(self.journals))[:ranks]:
            journal.write(self.step, groups[rank :: len(self.journals)])
            journal.settle()
        self.known = []
        return groups

    def save(self) -> None:
        for journal in reversed(self.journals):
            journal.begin_part()
            journal.remove_lost()


LIVES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 7), st.integers(0, 5), st.booleans(), st.integers(0, 1)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(LIVES)
def test_the_lineage_has_every_step_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, int, int, bool, int]]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    checkpoints: dict[int, list[list[Group]]] = {0: []}  # groups of the steps that led to each checkpoint
    pending: dict[int, Group] = {}  # journalled groups of the step after the newest checkpoint
    attempt = 0
    for number, (ranks, steps, torn, new_attempt, damaged) in enumerate(lives):
        attempt += new_attempt
        if fell_back := bool(damaged and len(checkpoints) > 1):
            del checkpoints[max(checkpoints)]
        start = max(checkpoints)
        lineage = list(checkpoints[start])
        ours = Attempt(run_dir, f"life {number}", attempt=attempt, step=start, ranks=ranks)
        known = {group.position: group for group in ours.known}
        if fell_back:
            # Groups after that older checkpoint still exist, unless a newer checkpoint has removed lost steps.
            pending = known
        assert known == pending
        for _ in range(steps):
            lineage.append(ours.write())
            ours.step += 1
            pending = pending if ours.step > start + 1 else {group.position: group for group in lineage[-1]}
            if ours.step % 3 == 0:
                ours.save()
                checkpoints = {**checkpoints, ours.step: list(lineage)}
                start, pending = ours.step, {}
        assert list(read_lineage(run_dir)) == lineage
        if torn < min(ranks, PROMPTS):  # further ranks have no prompt, so without them the step is complete
            groups = ours.write(torn)
            if ours.step == start:
                pending |= {group.position: group for rank in range(torn) for group in groups[rank::ranks]}
        assert list(read_lineage(run_dir)) == lineage


def test_a_step_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, "first", attempt=0, step=0, ranks=1)
    whole = [attempt.write()]
    attempt.step = 1
    attempt.write()
    (file,) = (tmp_path / "journal").glob("*/*/*.gz")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 5)

    assert list(read_lineage(tmp_path)) == whole


@pytest.mark.parametrize("lost", ["branch-0.0-at-0/steps-2", "branch-0.0-at-0"])
def test_a_reader_ends_before_steps_that_a_run_removes_meanwhile(tmp_path: Path, lost: str) -> None:
    """It may not go on with later steps that are still there."""
    first = Attempt(tmp_path, "first", attempt=0, step=0, ranks=1)
    wrote = []
    for first.step in range(6):
        wrote.append(first.write())
        if first.step % 2:
            first.save()
    lineage = read_lineage(tmp_path)
    assert [next(lineage), next(lineage)] == wrote[:2]
    shutil.rmtree(tmp_path / "journal" / lost)
    assert list(lineage) == []


def test_ranks_may_have_other_numbers_of_groups_in_each_step(tmp_path: Path) -> None:
    """As where groups are replaced (`training.maxResampleTimes`): a rank may have none at first."""
    branch, _ = begin_branch(tmp_path, attempt=0, step=0)
    steps = [[make_group(step, position) for position in range(PROMPTS)] for step in range(2)]
    steps[1][2] = replace(steps[1][2], slot=PROMPTS)
    for rank, shares in enumerate([(steps[0], steps[1][:1]), ([], steps[1][1:])]):
        journal = Journal(tmp_path, branch, rank)
        for step, share in enumerate(shares):
            journal.write(step, share)
        journal.close()
    assert list(read_lineage(tmp_path)) == steps


def test_groups_of_the_same_step_under_other_weights_are_not_used_again(tmp_path: Path) -> None:
    first = Attempt(tmp_path, "first", attempt=0, step=0, ranks=1)
    for first.step in range(4):
        first.write()
        if first.step == 1:
            first.save()
    # The checkpoint of step 2 is damaged: training again from step 0 gives other weights.
    second = Attempt(tmp_path, "second", attempt=1, step=0, ranks=1)
    assert len(second.known) == PROMPTS
    for second.step in range(2):
        second.write()
    assert Attempt(tmp_path, "third", attempt=2, step=2, ranks=1).known == []


def test_groups_of_newer_weights_than_the_checkpoint_are_not_used_again(tmp_path: Path) -> None:
    """Two steps are sampled together now; before, each had its own weights, or a push cut a completion."""
    branch, _ = begin_branch(tmp_path, attempt=0, step=3)
    journal = Journal(tmp_path, branch, 0)
    (old, _), (new, _) = (make_group(step, 0).completions for step in (3, 4))
    cut = replace(old, weight_updates=1)
    first = [replace(make_group(3, at), completions=(old, last)) for at, last in enumerate((old, cut, old))]
    second = [replace(make_group(4, at), completions=(old, last)) for at, last in enumerate((old, old, new))]
    for step, groups in ((3, first), (4, second), (5, [make_group(5, 0)])):
        journal.write(step, groups)
    journal.close()
    _, known = begin_branch(tmp_path, attempt=0, step=3, count=2)
    assert known == [first[0], first[2], *second[:2]]


def test_of_two_attempts_that_began_at_the_same_checkpoint_the_newest_groups_are_used_again(tmp_path: Path) -> None:
    """As where the settings changed in between, so that the second has sampled other groups."""
    first = Attempt(tmp_path, "first", attempt=0, step=0, ranks=1)
    older = first.write()
    second = Attempt(tmp_path, "second", attempt=1, step=0, ranks=2)
    second.known = []
    newer = second.write(1)  # its second rank, which has one group, was killed before
    third = Attempt(tmp_path, "third", attempt=2, step=0, ranks=1)
    assert third.known == [newer[0], older[1], newer[2]]


def test_lost_steps_are_removed_with_the_next_checkpoint(tmp_path: Path) -> None:
    first = Attempt(tmp_path, "first", attempt=0, step=0, ranks=2)
    for first.step in range(5):
        first.write()
        if first.step % 2:
            first.save()
    second = Attempt(tmp_path, "second", attempt=1, step=2, ranks=1)
    second.step = 2
    second.write()
    second.save()
    left = sorted(str(path.relative_to(tmp_path / "journal")) for path in (tmp_path / "journal").glob("*/*/*"))
    assert left == [
        "branch-0.0-at-0/steps-0/rank-0.jsonl.gz",
        "branch-0.0-at-0/steps-0/rank-1.jsonl.gz",
        "branch-1.0-at-2/steps-2/rank-0.jsonl.gz",
    ]


def test_a_lost_file_that_cannot_be_deleted_yet_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, while another client has it open."""
    first = Attempt(tmp_path, "first", attempt=0, step=0, ranks=1)
    for first.step in range(2):
        first.write()
        first.save()
    second = Attempt(tmp_path, "second", attempt=1, step=1, ranks=1)
    second.write()

    def is_open(path: object, **_: object) -> None:
        raise OSError(errno.EBUSY, "in use", path)

    lost = tmp_path / "journal" / "branch-0.0-at-0" / "steps-1"
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", is_open)
        second.save()
    assert lost.exists()
    second.save()
    assert not lost.exists()


@given(st.lists(st.floats(width=32)))
def test_log_probabilities_keep_their_bits_and_have_few_digits(values: list[float]) -> None:
    """NaN and infinity, which JSON lacks and no sampled token has, become NaN."""
    group = make_group(0, 0)
    completion = replace(group.completions[0], token_ids=tuple(range(len(values))), logprobs=tuple(values))
    line = to_line(replace(group, completions=(completion,)))
    expected = np.where(np.isfinite(values), values, np.nan).astype(np.float32)
    np.testing.assert_array_equal(np.float32(from_line(line).completions[0].logprobs), expected)
    assert all(len(digits) <= 15 for digits in re.findall(rb"[-+.\de]+", line.partition(b'"logprobs":')[2]))


def test_a_token_takes_few_bytes_and_the_file_is_readable_gzip(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, "first", attempt=0, step=0, ranks=1)
    (journal,) = attempt.journals
    journal.write(0, [make_group(0, position, tokens=2000) for position in range(PROMPTS)])
    journal.settle()
    (file,) = (tmp_path / "journal").glob("*/*/*.gz")
    assert file.stat().st_size / (PROMPTS * 2 * 2000) < 9  # without text; evenly drawn ids compress worst
    with gzip.open(file, "rt") as lines:
        assert len(lines.readlines()) == PROMPTS


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, "first", attempt=0, step=0, ranks=1)
    attempt.write()
    (journal,) = attempt.journals
    journal.begin_part()
    journal._file = Path("/dev/full").open("wb")  # noqa: SIM115  # closed with the journal
    with pytest.raises(OSError, match="cannot write the journal of the run: No space left on device: '/dev/full'"):
        attempt.write()


COUNTS = st.integers(0, 1000)
IDS = st.lists(COUNTS, max_size=3).map(tuple)
CONTEXT = st.lists(st.tuples(COUNTS, COUNTS), max_size=3).map(tuple)
LOGPROBS = st.lists(st.floats(-50, 0, width=32), max_size=3).map(tuple)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["assistant", "tool"]), "content": st.text()})
FORK = st.builds(Fork, prompt_ids=IDS, token_ids=IDS, logprobs=LOGPROBS, context=CONTEXT)
EPISODES = st.builds(
    Episode,
    messages=st.lists(MESSAGE, max_size=3).map(tuple),
    context=CONTEXT,
    prompt_ids=st.none() | IDS,
    observation=st.text(),
    forks=st.lists(FORK, max_size=2).map(tuple),
    num_turns=COUNTS,
    num_calls=COUNTS,
    num_failed_calls=COUNTS,
    call_seconds=st.floats(0, 1e6),
    retries=COUNTS,
    reward=st.none() | st.floats(allow_nan=False),
    lost=st.none() | st.text(),
    failure=st.text(),
)


@given(EPISODES)
def test_a_group_keeps_its_episodes_but_for_their_states(episode: Episode) -> None:
    group = make_group(0, 0)
    acted = replace(group.completions[0], episode=replace(episode, state=b"not JSON"))
    lost = replace(acted, token_ids=(), logprobs=(), text="", episode=replace(episode, lost="process"))
    found = from_line(to_line(replace(group, completions=(acted, lost, group.completions[0]))))
    assert found.completions == (acted, lost, group.completions[0])
    assert found.completions[0].episode is not None
    assert found.completions[0].episode.state is None
