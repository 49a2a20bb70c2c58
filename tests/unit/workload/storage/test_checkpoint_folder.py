"""Checkpoints are published whole, the newest are kept, damage is named, and superseded attempts change nothing."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from grpo_workload.storage.checkpoint_folder import CheckpointFolder, checkpoints, step_of
from grpo_workload.storage.fence import Fence, SupersededError
from grpo_workload.storage.manifest import describe, faults, read_manifest, write_manifest


def open_run(run_dir, attempt, *, keep=2):
    return CheckpointFolder(run_dir / "checkpoints", keep=keep, fence=Fence.take(run_dir, attempt, f"uid-{attempt}"))


def write(run, step):
    scratch = run.begin(f"step-{step}")
    (scratch / "model").mkdir()
    (scratch / "model" / "weights").write_text(f"weights of {step}")
    write_manifest(scratch, {"model/weights": describe(scratch / "model" / "weights")})
    return scratch


def save(run, step):
    published = run.publish(write(run, step))
    run.prune()
    return published


def names(run):
    return sorted(path.name for path in run.folder.iterdir())


def test_the_newest_checkpoints_are_kept_in_numeric_order(tmp_path):
    run = open_run(tmp_path, 0)
    for step in (2, 9, 10, 100):
        save(run, step)
    assert [step_of(path) for path in checkpoints(run.folder)] == [100, 10]


def test_the_checkpoint_of_the_best_step_is_kept_until_another_is_the_best(tmp_path):
    run = open_run(tmp_path, 0, keep=1)
    kept = []
    for step, best in [(2, None), (4, 4), (6, 4), (8, 4), (10, 10), (12, 3)]:
        run.publish(write(run, step))
        run.prune(best=best)
        kept.append([step_of(path) for path in checkpoints(run.folder)])
    assert kept == [[2], [4], [6, 4], [8, 4], [10], [12]]


def test_a_superseded_attempt_publishes_and_prunes_nothing(tmp_path):
    old = open_run(tmp_path, 1, keep=1)
    save(old, 4)
    scratch = write(old, 5)
    new = open_run(tmp_path, 2, keep=1)
    assert names(new) == ["step-4"], "the unfinished checkpoint of the old attempt is removed"
    of_a_folder = (lambda: old.publish(scratch), lambda: old.set_aside(new.folder / "step-4"))
    for attempt in (*of_a_folder, lambda: old.begin("step-6"), old.prune):
        with pytest.raises((SupersededError, FileNotFoundError)):
            attempt()
    assert names(new) == ["step-4"]
    save(new, 5)
    with pytest.raises(SupersededError, match="superseded by attempt 2"):
        old.prune()
    assert names(new) == ["step-5"]


def test_an_attempt_superseded_between_check_and_publish_publishes_nothing(tmp_path, monkeypatch):
    old = open_run(tmp_path, 1)
    scratch = write(old, 5)
    new = []
    check = Fence.check

    def check_then_lose(fence):
        check(fence)
        if fence.attempt == 1:
            new.append(open_run(tmp_path, 2))

    monkeypatch.setattr(Fence, "check", check_then_lose)
    with pytest.raises(FileNotFoundError):
        old.publish(scratch)
    assert names(new[0]) == []


def test_a_damaged_checkpoint_is_set_aside_and_deleted_after_the_next_is_published(tmp_path):
    run = open_run(tmp_path, 0)
    save(run, 1)
    damaged = save(run, 5)
    run.set_aside(damaged)
    assert names(run) == ["damaged-step-5", "step-1"]
    save(run, 3)
    assert names(run) == ["step-1", "step-3"]


def test_a_conversion_stays_until_a_newer_checkpoint_is_published(tmp_path):
    run = open_run(tmp_path, 0)
    checkpoint = save(run, 1)
    run.publish(run.begin(run.universal(checkpoint).name))
    assert names(open_run(tmp_path, 1)) == ["step-1", "universal-step-1"]
    save(open_run(tmp_path, 2), 2)
    assert names(run) == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: path.write_text("weights"), r"model/weights: has 7 bytes instead of 12"),
        (lambda path: path.write_text("weights of 2"), r"model/weights: its content has changed"),
        (lambda path: path.unlink(), r"model/weights: cannot be read: No such file"),
    ],
)
def test_a_fault_names_the_file_and_what_is_wrong_with_it(tmp_path, damage, fault):
    checkpoint = save(open_run(tmp_path, 0), 1)
    entries = read_manifest(checkpoint)
    assert faults(checkpoint, entries, entries) == []
    damage(checkpoint / "model" / "weights")
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(faults(checkpoint, entries, entries)[0])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {"a": {"bytes": 1}}}', "\x00" * 40])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    checkpoint = save(open_run(tmp_path, 0), 1)
    (checkpoint / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        read_manifest(checkpoint)


class Attempts(RuleBasedStateMachine):
    """Attempts start at any time; they save, are killed while they save, or try to save after they were superseded."""

    @initialize(keep=st.integers(1, 3))
    def start(self, keep):
        self.folder = tempfile.TemporaryDirectory()
        self.keep = keep
        self.step = 0
        self.published: list[int] = []
        self.attempts = [self.open(0)]

    def open(self, attempt):
        return open_run(Path(self.folder.name), attempt, keep=self.keep)

    @rule()
    def a_new_attempt_starts(self):
        self.attempts.append(self.open(len(self.attempts)))

    @rule(age=st.integers(0, 2), killed_after=st.sampled_from(["scratch", "publish", "prune"]))
    def an_attempt_saves(self, age, killed_after):
        age = min(age, len(self.attempts) - 1)
        run = self.attempts[-1 - age]
        self.step += 1
        if age > 0:
            with pytest.raises(SupersededError):
                save(run, self.step)
            return
        scratch = write(run, self.step)
        if killed_after != "scratch":
            run.publish(scratch)
            self.published.append(self.step)
            if killed_after == "prune":
                run.prune()

    @invariant()
    def the_newest_published_checkpoints_are_whole(self):
        found = checkpoints(self.attempts[-1].folder)
        steps = [step_of(path) for path in found]
        assert steps[: self.keep] == self.published[::-1][: self.keep]
        for path in found:
            entries = read_manifest(path)
            assert faults(path, entries, entries) == []

    def teardown(self):
        self.folder.cleanup()


TestAttempts = Attempts.TestCase
TestAttempts.settings = settings(max_examples=30, stateful_step_count=15)
