"""Access modes of a claim, and the pods that they serve."""

import pytest

from grpo_operator.passes.preflight import wrong_mode

ONE, POD, MANY, READ = "ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"

SUIT = {
    False: [([ONE], 1), ([POD], 1), ([MANY], 64), ([ONE, MANY], 2)],
    True: [([READ], 1), ([READ], 64), ([MANY], 64)],
}
DO_NOT = {False: [([ONE], 2), ([READ], 1), ([], 1)], True: [([ONE], 2)]}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_claim_must_be_writable_and_shared_unless_it_is_only_read(read_only: bool) -> None:
    for modes, pods in SUIT[read_only]:
        assert wrong_mode(modes, pods=pods, read_only=read_only) is None
    for modes, pods in DO_NOT[read_only]:
        assert wrong_mode(modes, pods=pods, read_only=read_only) is not None


def test_the_message_says_who_and_which_mode_would_work() -> None:
    said = "has the access modes ReadWriteOnce, but each of 3 pods writes to it; use a claim with ReadWriteMany"
    assert wrong_mode([ONE], pods=3, read_only=False) == said
    read = wrong_mode([ONE], pods=2, read_only=True) or ""
    assert read.endswith("each of 2 pods reads from it; use a claim with ReadOnlyMany or ReadWriteMany")
