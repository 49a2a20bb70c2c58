"""However many pods take the fence at once, one pod of the newest attempt holds it; the others get a clear error."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.storage.fence import Fence, SupersededError


def race(run_dir, contenders):
    """Let each (attempt, pod uid) take the fence in its own thread, all at once; return fences and errors in order."""
    barrier, outcomes = threading.Barrier(len(contenders)), [None] * len(contenders)

    def take(index):
        barrier.wait()
        try:
            outcomes[index] = Fence.take(run_dir, *contenders[index])
        except SupersededError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=take, args=[index]) for index in range(len(contenders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def holds(outcome):
    if not isinstance(outcome, Fence):
        return False
    try:
        outcome.check()
    except SupersededError:
        return False
    return True


@pytest.mark.parametrize("attempt", range(20))
def test_one_of_four_pods_that_start_the_same_attempt_at_once_gets_it(tmp_path, attempt):
    outcomes = race(tmp_path, [(3, f"uid-{index}") for index in range(4)])
    assert sum(holds(outcome) for outcome in outcomes) == 1


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2).map("uid-{}".format)), min_size=1, max_size=6, unique=True)
)
def test_of_any_attempts_at_once_one_pod_of_the_newest_holds_the_fence(tmp_path_factory, contenders):
    outcomes = race(tmp_path_factory.mktemp("run"), contenders)
    newest = max(attempt for attempt, _ in contenders)
    assert [attempt for (attempt, _), outcome in zip(contenders, outcomes, strict=True) if holds(outcome)] == [newest]


def test_the_error_names_both_attempts_and_the_holder_and_says_what_happens_next(tmp_path):
    fence = Fence.take(tmp_path, 3, "uid-a")
    assert json.loads((tmp_path / "fence" / "attempt-3").read_text())["podUid"] == "uid-a"
    held = r"attempt 3 .* held by pod uid uid-a, and this is pod uid uid-b.*attempt 4"
    with pytest.raises(SupersededError, match=held):
        Fence.take(tmp_path, 3, "uid-b")
    assert Fence.take(tmp_path, 3, "uid-a") == fence, "the same pod may take it again"
    Fence.take(tmp_path, 5, "uid-c")
    superseded = r"^attempt 3 of this job was superseded by attempt 5, held by pod uid uid-c; nothing was published$"
    with pytest.raises(SupersededError, match=superseded):
        fence.check()
    with pytest.raises(SupersededError, match=superseded):
        Fence.take(tmp_path, 3, "uid-a")


def test_a_fence_file_left_empty_by_a_kill_still_counts(tmp_path):
    fence = Fence.take(tmp_path, 1, "uid-a")
    (tmp_path / "fence" / "attempt-2").touch()
    with pytest.raises(SupersededError, match=r"superseded by attempt 2, held by pod uid unknown"):
        fence.check()
    with pytest.raises(SupersededError, match=r"attempt 2 of this job is held by pod uid unknown"):
        Fence.take(tmp_path, 2, "uid-b")


def test_a_volume_that_cannot_be_written_is_named_with_the_user(tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(NotADirectoryError, match=r"cannot write to the run's folder as user \d+: .*/run/fence'$"):
        Fence.take(tmp_path / "run", 0, "uid-a")
