"""Access modes of a claim, and the pods that they serve."""

from grpo_operator.passes.preflight import wrong_mode

ONE, POD, MANY, READ = "ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"


WRITTEN = [([ONE], 1), ([POD], 1), ([MANY], 64), ([ONE, MANY], 2)]
READ_ONLY = [([READ], 1), ([READ], 64), ([MANY], 64)]


def test_a_claim_must_be_writable_and_shared_unless_it_is_only_read() -> None:
    for read_only, suit, do_not in (
        (False, WRITTEN, [([ONE], 2), ([READ], 1), ([], 1)]),
        (True, READ_ONLY, [([ONE], 2)]),
    ):
        assert not [row for row in suit if wrong_mode(row[0], pods=row[1], read_only=read_only)]
        assert not [row for row in do_not if not wrong_mode(row[0], pods=row[1], read_only=read_only)]


def test_the_message_says_who_and_which_mode_would_work() -> None:
    said = "has the access modes ReadWriteOnce, but each of 3 pods writes to it; use a claim with ReadWriteMany"
    assert wrong_mode([ONE], pods=3, read_only=False) == said
    read = wrong_mode([ONE], pods=2, read_only=True) or ""
    assert read.endswith("each of 2 pods reads from it; use a claim with ReadOnlyMany or ReadWriteMany")
