"""Every field of the CRD has a description that is a sentence, and docs/fields.md shows them all."""

from collections.abc import Iterator
from typing import Any

import pytest

from grpo_operator.api.crd import FIELDS_PAGE, crd
from grpo_operator.api.reference_page import render

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def properties(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property at every depth, as (path, schema)."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from properties(field, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            yield from properties(schema[inner], f"{path}[]")


PROPERTIES = {
    path: field
    for part in ("spec", "status")
    for path, field in properties(SCHEMA["properties"][part], f"grpojob.{part}")
}


def test_every_property_at_every_depth_is_described() -> None:
    assert len(PROPERTIES) > 250
    assert [path for path, field in PROPERTIES.items() if not field.get("description", "").strip()] == []


def test_descriptions_are_sentences() -> None:
    assert [path for path, field in PROPERTIES.items() if not field["description"].endswith((".", "..."))] == []


def test_the_page_is_generated_from_the_models_and_names_every_field_once() -> None:
    page = FIELDS_PAGE.read_text()
    assert page == render(SCHEMA), "run `make crds`"
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))
    for path in PROPERTIES:
        assert f"`{path.rpartition('.')[2]}`" in page, path


@pytest.mark.parametrize(
    "row",
    [
        "| **`model`** | object |  | The policy to train. |",
        "| `numGenerations` | integer from 2 to 1024 | `8` | "
        "Number of completions sampled for each prompt (GRPO's group). |",
        "| `podTemplate` | object |  | Pod settings of this group, merged over spec.podTemplate like a strategic merge "
        "patch. Its fields are those of `spec.podTemplate`. |",
    ],
)
def test_rows_show_type_bounds_default_and_where_a_section_is_described(row: str) -> None:
    assert row in FIELDS_PAGE.read_text().splitlines()
