"""docs/models.md lists exactly the families that test_families.py runs, and what the stored results say was tried."""

import re

import pytest
from benchmarks.weights.models_page import PUSHES, fill, pushes, trainings
from benchmarks.weights.train_families import MODES

from grpo_spec.inputs import VISION_FAMILIES
from grpo_workload.policy.model.families import ADAPTERS, ALL, TESTED, ZERO3
from support.families import FAMILIES, MASKED, STATEFUL
from support.paths import ROOT

HEAD = "| `model_type` | for example | trained | and pushed | only pushes |\n|---|---|---|---|---|\n"
PAGE = (ROOT / "docs" / "models.md").read_text()
TABLES = PAGE.split(HEAD)[1:]


@pytest.mark.parametrize(("table", "families"), list(zip(TABLES, [FAMILIES, STATEFUL, MASKED], strict=True)))
def test_each_family_that_is_tested_has_a_row(table, families):
    rows = table.split("\n\n")[0].splitlines()
    assert [row.split("|")[1].strip() for row in rows] == [f"`{family}`" for family in families]


def test_the_columns_are_what_was_tried():
    assert fill(PAGE) == PAGE, "python -m benchmarks.weights.models_page writes them"


def test_the_readme_counts_what_was_tried():
    trained, followed = (
        sum(places["CPU"] >= {*MODES} for places in results.values())
        for results in (trainings(), trainings(of_pushes=True))
    )
    on_a_gpu = sum(places["H100"] >= {*MODES} for places in trainings(of_pushes=True).values())
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{trained} families take the steps" in text
    assert f"checked for {followed} of them there, and for {on_a_gpu} on an H100" in text


def test_each_vision_family_has_a_row_and_pushes_that_were_tried():
    _, section = PAGE.split("## Vision-language models\n")
    named = re.findall(r"^\| `(\w+)` \|", section.split("\n## ")[0], re.MULTILINE)
    assert tuple(named) == ("model_type", *VISION_FAMILIES)
    assert all(pushes()[family] == {"CPU": {PUSHES["all"]}} for family in VISION_FAMILIES)


def test_the_table_of_families_is_what_was_tried():
    modes = {PUSHES["all"]: ALL, PUSHES["zero3"]: ZERO3, PUSHES["adapters"]: ADAPTERS}
    assert {*TESTED} == {*FAMILIES, *STATEFUL, *MASKED, *VISION_FAMILIES}
    followed = trainings(of_pushes=True), pushes()
    for family, arrived in TESTED.items():
        tried = {mode for results in followed for found in results[family].values() for mode in found}
        assert list(arrived) == [word for mode, word in modes.items() if mode in tried], family
