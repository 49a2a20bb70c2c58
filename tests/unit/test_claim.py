"""One epoch at a time may write, however many believe that it is theirs."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_workload.claim import Claim, SupersededError


def race(run_dir, contenders):
    """Each (epoch, pod uid) claims in a thread of its own, all at once; the claims and refusals in their order."""
    barrier, outcomes = threading.Barrier(len(contenders)), [None] * len(contenders)

    def take(index):
        barrier.wait()
        try:
            outcomes[index] = Claim.take(run_dir, *contenders[index])
        except SupersededError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=take, args=[index]) for index in range(len(contenders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def holds(outcome):
    if not isinstance(outcome, Claim):
        return False
    try:
        outcome.check()
    except SupersededError:
        return False
    return True


@pytest.mark.parametrize("attempt", range(20))
def test_of_two_pods_that_claim_an_epoch_at_once_exactly_one_has_it(tmp_path, attempt):
    outcomes = race(tmp_path, [(3, f"uid-{index}") for index in range(4)])
    assert sum(holds(outcome) for outcome in outcomes) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2).map("uid-{}".format)), min_size=1, max_size=6, unique=True))
def test_whatever_claims_come_at_once_one_pod_of_the_newest_epoch_holds_the_run(tmp_path_factory, contenders):
    outcomes = race(tmp_path_factory.mktemp("run"), contenders)
    newest = max(epoch for epoch, _ in contenders)
    assert [epoch for (epoch, _), outcome in zip(contenders, outcomes, strict=True) if holds(outcome)] == [newest]


def test_a_refusal_names_epochs_and_holder_and_says_what_comes_next(tmp_path):
    claim = Claim.take(tmp_path, 3, "uid-a")
    assert json.loads((tmp_path / "claims" / "epoch-3").read_text())["podUid"] == "uid-a"
    with pytest.raises(SupersededError, match=r"epoch 3 .* claimed by pod uid uid-a, and this is pod uid uid-b.*epoch 4"):
        Claim.take(tmp_path, 3, "uid-b")
    assert Claim.take(tmp_path, 3, "uid-a") == claim, "the same pod may ask again"
    Claim.take(tmp_path, 5, "uid-c")
    superseded = r"^epoch 3 of this job was superseded by epoch 5, claimed by pod uid uid-c; nothing was published$"
    with pytest.raises(SupersededError, match=superseded):
        claim.check()
    with pytest.raises(SupersededError, match=superseded):
        Claim.take(tmp_path, 3, "uid-a")


def test_a_claim_cut_off_while_it_was_written_still_counts(tmp_path):
    claim = Claim.take(tmp_path, 1, "uid-a")
    (tmp_path / "claims" / "epoch-2").touch()
    with pytest.raises(SupersededError, match=r"superseded by epoch 2, claimed by pod uid unknown"):
        claim.check()
    with pytest.raises(SupersededError, match=r"epoch 2 of this job is claimed by pod uid unknown"):
        Claim.take(tmp_path, 2, "uid-b")
