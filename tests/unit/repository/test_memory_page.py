"""The page of the planner has the planner's own tables, and recorded peaks are planned about as they were."""

import re

import pytest
from benchmarks.training import memory_page


@pytest.fixture(scope="module")
def filled() -> str:
    return memory_page.fill(memory_page.PAGE.read_text())


def test_the_page_has_the_planners_tables(filled: str) -> None:
    assert memory_page.PAGE.read_text() == filled


def test_recorded_peaks_are_planned(filled: str) -> None:
    section = filled.split("<!-- generated: recorded -->")[1].split("<!-- end -->")[0]
    off = [float(found) for found in re.findall(r"\| ([+-]\d+\.\d)% \|", section)]
    assert len(off) == len(memory_page.RECORDED)
    assert max(map(abs, off)) <= 6
    # Of the peaks that torch counted itself, without fragments, which are not planned.
    beside_torch = [one for one, row in zip(off, memory_page.RECORDED, strict=True) if row.leaves_out]
    assert max(map(abs, beside_torch)) <= 1
