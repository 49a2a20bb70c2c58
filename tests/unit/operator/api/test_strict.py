"""What is read strictly is what the CRD's schema accepts, with every type and name, for mutated specs of all examples;
rules between fields are compared by an API server (tests/api/test_crd.py)."""

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator
from pydantic import ValidationError

from grpo_cli.documents.manifest import as_json
from grpo_operator.api.crd import crd
from grpo_operator.api.spec import GRPOJobSpec, parse_spec
from grpo_operator.api.strict import read_strictly
from support.control_plane.jobs import spec
from support.control_plane.mutated_specs import mutated
from support.paths import EXAMPLES

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
SPECS = [
    document["spec"]
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document["kind"] == "GRPOJob"
]


def _closed(schema: Any) -> Any:
    """The schema as one of JSON: it refuses the fields that an API server calls unknown."""
    out = dict(schema)
    if pattern := out.get("pattern"):
        out["pattern"] = pattern.replace("$", r"\Z")  # Go's
    if "properties" in out:
        out["properties"] = {name: _closed(one) for name, one in out["properties"].items()}
        out["additionalProperties"] = False
    elif "additionalProperties" in out:
        out["additionalProperties"] = _closed(out["additionalProperties"])
    if "items" in out:
        out["items"] = _closed(out["items"])
    return out


def _without_nulls(value: Any, schema: Any) -> Any:
    """As an API server: a field that is null is not there, unless the schema leaves its shape open."""
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        return {key: _without_nulls(one, fields.get(key, rest)) for key, one in value.items() if one is not None}
    return [_without_nulls(one, schema.get("items", {})) for one in value] if isinstance(value, list) else value


VALIDATOR = Draft4Validator(_closed(SCHEMA))


@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_mutated_spec_has_one_verdict(data: st.DataObject) -> None:
    def choose(items: Any) -> Any:
        return data.draw(st.sampled_from(items))

    written = as_json(mutated(choose(SPECS), SCHEMA, choose))
    theirs = [error.message for error in VALIDATOR.iter_errors(_without_nulls(written, SCHEMA))]
    try:
        read_strictly(GRPOJobSpec, written)
        ours = []
    except ValidationError as error:
        ours = [fault for fault in error.errors(include_url=False) if not _is_of_a_rule(fault, error)]
    assert bool(ours) == bool(theirs), (ours, theirs)


def _is_of_a_rule(fault: Any, error: ValidationError) -> bool:
    """Whether the fault is a broken rule, or a list that is too short for pydantic without items that break one."""
    below = [one["type"] for one in error.errors() if one["loc"][: len(fault["loc"])] == fault["loc"]]
    return fault["type"] == "value_error" or (fault["type"] == "too_short" and "value_error" in below)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"training": {"max_steps": 5}}, "spec.training.max_steps: unknown field; did you mean maxSteps?"),
        ({"training": {"learningRate": "2e-5"}}, "spec.training.learningRate: Input should be a valid number"),
        ({"training": {"maxSteps": "5"}}, "spec.training.maxSteps: Input should be a valid integer"),
        ({"training": {"maxSteps": True}}, "spec.training.maxSteps: Input should be a valid integer"),
        ({"image": 3}, "spec.image: Input should be a valid string"),
        ({"rewards": [None]}, "spec.rewards[0]: Input should be an object"),
    ],
)
def test_types_and_names_are_those_of_the_api(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[").replace("?", r"\?")):
        parse_spec(spec(**change))


def test_a_field_that_is_null_is_as_one_that_is_not_there() -> None:
    read, written = read_strictly(GRPOJobSpec, spec(image=None, unknown=None, training={"maxSteps": 5, "seed": None}))
    assert read == parse_spec(spec(training={"maxSteps": 5}))
    assert written == spec(training={"maxSteps": 5})
