"""docs/models.md lists exactly the families that test_families.py runs, and the pushes whose results are stored."""

import json
import re
from collections import defaultdict

import pytest

from grpo_workload.policy.families import ADAPTERS, ALL, TESTED, ZERO3
from grpo_workload.spec.inputs import VISION_FAMILIES
from support.families import FAMILIES, MASKED, STATEFUL
from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
HEAD = "| `model_type` | for example | pushes | ZeRO-3 | LoRA |\n|---|---|---|---|---|\n"
TABLES = (ROOT / "docs" / "models.md").read_text().split(HEAD)[1:]
PLACES = {"CPU": "families_cpu.jsonl", "H100": "families_h100.jsonl", "H200": "families_h200.jsonl"}


@pytest.mark.parametrize(("table", "families"), list(zip(TABLES, [FAMILIES, STATEFUL, MASKED], strict=True)))
def test_each_family_that_is_tested_has_a_row_with_the_pushes_that_were_tried(table: str, families: list[str]) -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.split("\n\n")[0].splitlines()]
    assert [name for name, *_ in rows] == [f"`{family}`" for family in families]
    tried = pushes()
    assert {name.strip("`"): cells for name, _, *cells in rows} == {
        family: [", ".join(tried[family, mode]) for mode in ("all", "zero3", "adapters")] for family in families
    }


def test_each_vision_family_has_a_row_and_pushes_that_were_tried() -> None:
    _, section = (ROOT / "docs" / "models.md").read_text().split("## Vision-language models\n")
    named = re.findall(r"^\| `(\w+)` \|", section.split("\n## ")[0], re.MULTILINE)
    assert tuple(named) == ("model_type", *VISION_FAMILIES)
    assert {tuple(pushes()[family, "all"]) for family in VISION_FAMILIES} == {("CPU",)}


def test_the_table_of_families_is_what_was_tried() -> None:
    modes = {"all": ALL, "zero3": ZERO3, "adapters": ADAPTERS}
    assert {*TESTED} == {*FAMILIES, *STATEFUL, *MASKED, *VISION_FAMILIES}
    for family, arrived in TESTED.items():
        assert list(arrived) == [word for mode, word in modes.items() if pushes()[family, mode]], family


def pushes() -> dict[tuple[str, str], list[str]]:
    """Return on which devices three pushes arrived, for each family and mode of `benchmarks.weights.families`."""
    arrived = defaultdict(list)
    for place, name in PLACES.items():
        for line in (RESULTS / name).read_text().splitlines():
            row = json.loads(line)
            if "error" not in row:
                assert len(row["pushed"]) == 3
                arrived[row["family"], row["mode"]].append(place)
    return arrived
