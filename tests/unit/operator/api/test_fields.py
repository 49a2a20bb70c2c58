"""Every field of the CRD has a description that is a sentence, and docs/fields.md shows them all. An optional one that
no example sets says when to set it.

That the page is generated from the models, `make lint` checks.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from grpo_operator.api.crd import FIELDS_PAGE, crd, whole_schema
from support.paths import EXAMPLES

SCHEMA = whole_schema()


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


def test_rewards_of_an_evaluation_are_as_those_of_the_job() -> None:
    """A default would make a choice that the user did not make."""
    assert PROPERTIES["grpojob.spec.evaluation.rewards"]["items"] == PROPERTIES["grpojob.spec.rewards"]["items"]


def test_every_property_at_every_depth_is_described_in_sentences() -> None:
    assert len(PROPERTIES) > 250
    assert [path for path, field in PROPERTIES.items() if not field.get("description", "").endswith(".")] == []


def keys(node: Any) -> Iterator[str]:
    """Yield every key of a manifest, at every depth."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield key
        yield from keys(value)
    for value in node if isinstance(node, list) else ():
        yield from keys(value)


def test_an_optional_field_that_no_example_sets_says_when_to_set_it() -> None:
    manifests = [yaml.safe_load_all(path.read_text()) for path in EXAMPLES.rglob("*.yaml")]
    shown = {key for documents in manifests for document in documents for key in keys(document)}
    silent = []
    for path, field in PROPERTIES.items():
        above, _, name = path.rpartition(".")
        section = PROPERTIES.get(above.removesuffix("[]"), SCHEMA["properties"]["spec"])
        has_fields = "properties" in field.get("items", field)
        is_required = name in section.get("items", section).get("required", ())
        if not path.startswith("grpojob.spec.") or has_fields or is_required or name in shown:
            continue
        if not re.search(r"\b(Set|Raise|Lower|Change|set it) ", field["description"]):
            silent.append(path)
    assert silent == []


def test_the_page_names_every_field_once() -> None:
    page = FIELDS_PAGE.read_text()
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))
    for path in PROPERTIES:
        assert f"`{path.rpartition('.')[2]}`" in page, path


def rules(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object with rules, and each of its rules."""
    yield from ((schema, one["rule"]) for one in schema.get("x-kubernetes-validations", ()))
    inner = [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    for child in [*schema.get("properties", {}).values(), *inner]:
        yield from rules(child)


def may_be_missing(schema: dict[str, Any], path: list[str]) -> Iterator[str]:
    """Yield the parts of `path`, each with those before it, that an object need not have when the rule is evaluated."""
    for depth, name in enumerate(path):
        if (field := schema.get("properties", {}).get(name)) is None:
            return
        if name not in schema.get("required", ()) and "default" not in field:
            yield ".".join(path[: depth + 1])
        schema = field


RULES = list(rules(SCHEMA["properties"]["spec"]))


@pytest.mark.parametrize(("schema", "rule"), RULES, ids=[rule[:60] for _, rule in RULES])
def test_a_rule_asks_whether_a_field_is_there_before_it_reads_it(schema: dict[str, Any], rule: str) -> None:
    """The API server refuses the object otherwise, as it cannot evaluate the rule."""
    for path in re.findall(r"\bself\.(\w+(?:\.\w+)*)", rule):
        for part in may_be_missing(schema, path.split(".")):
            assert f"has(self.{part})" in rule, f"self.{part} is optional and has no default"


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


def test_rules_write_words_of_cel_as_every_kubernetes_reads_them() -> None:
    """`self.function` compiles from Kubernetes 1.32 on; 1.30 and 1.31 refuse the whole CRD for it."""
    text = " ".join(json.dumps(crd()).split())
    words = "as|break|const|continue|else|for|function|if|import|let|loop|package|namespace|return|var|void|while"
    assert re.findall(rf"[sS]elf[.\w]*\.(?:{words})\b", text) == []
    assert "has(self.__function__)" in text


def test_the_crd_fits_into_the_annotation_of_a_client_side_apply() -> None:
    """`kubectl apply` without --server-side writes the object into an annotation, of 262,144 bytes at most."""
    assert len(json.dumps(crd(), separators=(",", ":"))) < 250_000
