"""Generated parts of pages and plots are those of the stored raw lines; what they say of made-up lines is right."""

import html
import json
import re
from typing import Any

import pytest
from benchmarks.control_plane import accounts, page, plots
from benchmarks.control_plane.figures import TARGETS, Lines, percentile

from support.paths import ROOT

LINES = Lines.read(page.RESULTS)


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_generated_parts_of_pages_are_of_the_stored_lines(path: Any) -> None:
    assert path.read_text() == page.fill(path.read_text(), LINES), "run `python -m benchmarks.control_plane.page`"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_plots_show_the_stored_lines(name: str) -> None:
    image = (page.IMAGES / name).read_text()
    (shown,) = re.findall(r"<dc:description>(.*?)</dc:description>", image, re.DOTALL)
    data = plots.PLOTS[name][0](LINES)
    assert json.loads(html.unescape(shown)) == data, "run `python -m benchmarks.control_plane.page`"


def start(side: str, repetition: int, ready: float, status: float | None, **more: Any) -> dict[str, Any]:
    """A line of 250 jobs."""
    line = {"scenario": "jobs", "side": side, "repetition": repetition, "jobs": 250, "pods": 1000, "busy": 0.5}
    line |= {"cpu": {program: 2.0 for program in accounts.PROGRAMS} | {"controller": 4.0}}
    return line | {"seconds": {"ready": ready, "status": status}, "requests": {"create services": 500}} | more


MADE_UP = Lines(
    [
        *(start("bare", number, ready, None) for number, ready in enumerate([10.0, 30.0, 11.0])),
        *(start("grpojob", number, 12.0, status) for number, status in enumerate([16.0, 16.5, 17.0])),
        *(start("jobset", number, 30.0, 33.0) for number in range(3)),
    ]
)


def test_ratios_are_of_single_repetitions_and_count_the_status() -> None:
    rows = page.targets(MADE_UP).splitlines()
    said = [[" 1.55x ", " no "], [" 0.50x ", " yes "], [" not measured ", "  "]]
    assert [row.rsplit("|", 3)[1:3] for row in rows[2:5]] == said
    incomplete = Lines([start("grpojob", 0, 12.0, 15.0), *MADE_UP.every[:3]])
    assert " 1.50x | yes |" in page.targets(incomplete)


def test_a_side_has_its_row_next_to_bare_and_jobset() -> None:
    row = page.PARTS["jobs"](MADE_UP).splitlines()[3]
    assert row == "| GRPOJob | 12.0 s (12.0 to 12.0) | 16.5 s (16.0 to 17.0) | 1.55x | 0.50x | 2 | 4.0 s | 50% |"


def test_the_processor_time_of_all_programs_is_summed() -> None:
    row = page.PARTS["programs"](MADE_UP).splitlines()[3]
    assert row == "| GRPOJob | 2.0 s | 2.0 s | 2.0 s | 2.0 s | 2.0 s | 4.0 s | 2.0 s | 16.0 s |"


def test_a_request_costs_what_all_programs_take_times_how_often_a_job_needs_it() -> None:
    one = {program: 1.0 for program in accounts.PROGRAMS} | {"kube-apiserver": 5.0}
    line = {"scenario": "costs", "side": "grpojob", "costs": {"create grpojobs": one, "create services": one}}
    rows = page.PARTS["costs"](Lines([*MADE_UP.every, line])).splitlines()[2:]
    assert rows == [
        "| create services | 2.0 | 5.0 ms | 4.0 ms | 1.0 ms | 1.0 ms | 22 ms |",
        "| create grpojobs | 1.0 | 5.0 ms | 4.0 ms | 1.0 ms | 1.0 ms | 11 ms |",
    ]


def test_what_is_not_measured_is_said() -> None:
    assert all(target.measured(Lines([])) is None for target in TARGETS)
    assert {page.PARTS[name](Lines([])) for name in page.PARTS if name != "targets"} == {page.NOT_MEASURED}


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.01, 0.5, 0.95, 1.0)] == [1.0, 2.0, 3.0, 3.0]


def test_results_name_no_folder_of_a_machine() -> None:
    assert str(ROOT) not in "".join(map(json.dumps, LINES.every))
