"""docs/models.md lists exactly the families that test_families.py runs, and the pushes whose results are stored."""

import re

import pytest

from grpo_workload.spec.inputs import VISION_FAMILIES
from support.families import FAMILIES, MASKED, STATEFUL
from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
HEAD = "| `model_type` | for example | pushes |\n|---|---|---|\n"
TABLES = (ROOT / "docs" / "models.md").read_text().split(HEAD)[1:]


@pytest.mark.parametrize(("table", "families"), zip(TABLES, [FAMILIES, STATEFUL, MASKED], strict=True))
def test_each_family_that_is_tested_has_a_row_with_the_pushes_that_were_tried(table: str, families: list[str]) -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.split("\n\n")[0].splitlines()]
    assert [name for name, _, _ in rows] == [f"`{family}`" for family in families]
    assert {name.strip("`"): pushes for name, _, pushes in rows} == {family: pushes_of(family) for family in families}


def test_each_vision_family_has_a_row_and_pushes_that_were_tried() -> None:
    _, section = (ROOT / "docs" / "models.md").read_text().split("## Vision-language models\n")
    named = re.findall(r"^\| `(\w+)` \|", section.split("\n## ")[0], re.MULTILINE)
    assert tuple(named) == ("model_type", *VISION_FAMILIES)
    assert all(pushes_of(family) == "CPU" for family in VISION_FAMILIES)


def pushes_of(family: str) -> str:
    places = {"CPU": "family_pushes_cpu.txt", "H200": "gpu_tests_h200.txt"}
    done = rf"^{family}-\w+: after the push of version 2, log-probabilities differ by \S+ at most$"
    return ", ".join(place for place, name in places.items() if re.search(done, (RESULTS / name).read_text(), re.M))
