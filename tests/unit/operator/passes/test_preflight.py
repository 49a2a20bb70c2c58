"""Access modes of a claim, and the pods that they serve."""

import pytest

from grpo_operator.passes.preflight import wrong_mode

ONE, POD, MANY, READ = "ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"


@pytest.mark.parametrize(
    ("modes", "pods", "read_only", "suits"),
    [
        ([ONE], 1, False, True),
        ([POD], 1, False, True),
        ([ONE], 2, False, False),
        ([MANY], 64, False, True),
        ([ONE, MANY], 2, False, True),
        ([READ], 1, False, False),
        ([READ], 1, True, True),
        ([READ], 64, True, True),
        ([MANY], 64, True, True),
        ([ONE], 2, True, False),
        ([], 1, False, False),
    ],
)
def test_a_claim_must_be_writable_and_shared_unless_it_is_only_read(
    modes: list[str], pods: int, read_only: bool, suits: bool
) -> None:
    wrong = wrong_mode(modes, pods=pods, read_only=read_only)
    assert (wrong is None) is suits


def test_the_message_says_who_and_which_mode_would_work() -> None:
    said = "has the access modes ReadWriteOnce, but each of 3 pods writes to it; use a claim with ReadWriteMany"
    assert wrong_mode([ONE], pods=3, read_only=False) == said
    read = wrong_mode([ONE], pods=2, read_only=True) or ""
    assert read.endswith("each of 2 pods reads from it; use a claim with ReadOnlyMany or ReadWriteMany")
