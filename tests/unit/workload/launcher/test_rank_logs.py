"""Lines of ranks' logs appear in the launcher's output, whole and each with its rank, also those without an end."""

from __future__ import annotations

import io
from pathlib import Path

from grpo_devcluster.progress import wait_until
from grpo_workload.launcher.rank_logs import LogCopies


def test_a_line_is_copied_when_it_ends_and_the_last_one_at_the_end(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text("")
    copies, shown = LogCopies(), io.StringIO()
    copies.begin(log, "[rank 3] ", shown)
    with log.open("a") as file:
        file.write("first\nsec")
        file.flush()
        wait_until(lambda: "first" in shown.getvalue(), "the line is copied", 60)
        assert shown.getvalue() == "[rank 3] first\n"
        file.write("ond\nand no end")
    copies.finish()
    assert shown.getvalue() == "[rank 3] first\n[rank 3] second\n[rank 3] and no end\n"


def test_all_that_was_written_before_the_end_is_copied(tmp_path: Path) -> None:
    copies, streams = LogCopies(), [io.StringIO(), io.StringIO()]
    for number, stream in enumerate(streams):
        (tmp_path / str(number)).write_text("\xe4\n" * 1000, encoding="latin-1")  # bytes that are no UTF-8 stop nothing
        copies.begin(tmp_path / str(number), f"{number} ", stream)
    copies.finish()
    assert [len(stream.getvalue().splitlines()) for stream in streams] == [1000, 1000]
