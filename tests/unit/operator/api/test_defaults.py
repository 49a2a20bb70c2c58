"""A spec is stored without defaults; those that a job begins with are kept, and are its own in every release.

tests/api/test_upgrade.py shows it with an API server and two releases.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from grpo_operator.api.crd import crd, default_lines, whole_schema
from grpo_operator.api.defaults import together, used_defaults, with_defaults
from grpo_operator.api.spec import GRPOJobSpec, parse_spec
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.api.user_schema import without_defaults
from grpo_operator.decide.attempts import next_attempt
from grpo_spec.schema import Section
from support.control_plane.jobs import spec
from support.control_plane.passes import Case

WIDE = spec(
    evaluation={"dataset": {"name": "d"}, "everySteps": 5, "rewards": [{"name": "r", "exactMatch": {}}]},
    lora={"r": 8},
    storage={"claimName": "c", "export": {"everySteps": 1}},
    generation={"topology": "Server", "server": {"groups": [{"name": "g", "gpus": 1}]}},
)


class _Inner(Section):
    kept: int = Field(1)
    since: int | None = Field(None)


class _Older(Section):
    inner: _Inner = Field(default_factory=_Inner)
    items: tuple[_Inner, ...] = Field(())
    chosen: _Inner | None = Field(None)


class _NewInner(Section):
    kept: int = Field(2)
    since: int | None = Field(7)
    new: bool = Field(True)


class _Newer(Section):
    inner: _NewInner = Field(default_factory=_NewInner)
    items: tuple[_NewInner, ...] = Field(())
    chosen: _NewInner | None = Field(None)


@pytest.mark.parametrize(
    "raw", [{}, {"inner": {}}, {"inner": {"since": 5}}, {"items": [{}, {"kept": 3}]}, {"items": [{}], "chosen": {}}]
)
def test_another_release_reads_what_is_unset_as_the_job_began(raw: dict[str, Any]) -> None:
    older = _Older.model_validate(raw)
    newer = _Newer.model_validate(with_defaults(_Newer, raw, used_defaults(older)))
    assert newer.model_dump(exclude={"inner": {"new"}, "items": {"__all__": {"new"}}, "chosen": {"new"}}) == (
        older.model_dump()
    )
    assert newer.inner.new, "a field that the older release did not have"


def test_what_a_job_uses_later_is_kept_from_then_on() -> None:
    kept = used_defaults(_Older.model_validate({}))
    later = {"chosen": {}, "items": [{"since": 1}]}
    now = _Newer.model_validate(with_defaults(_Newer, later, kept))
    assert (now.chosen, now.items[0].kept) == (_NewInner(), 2)
    assert together(kept, used_defaults(now)) == {
        "inner": {"kept": 1, "new": True},
        "items": {"kept": 2, "new": True},
        "chosen": {"kept": 2, "since": 7, "new": True},
    }


def test_the_first_attempt_keeps_the_defaults_and_later_ones_do_not_change_them() -> None:
    first = Case().last.status
    assert first.defaults == used_defaults(parse_spec(spec()))
    assert next_attempt(first) == 1
    theirs = together({"training": {"numGenerations": 4}}, dict(first.defaults or {}))
    stored = read_spec(spec(training={"maxSteps": 7}), GRPOJobStatus(attempt=0, defaults=theirs))
    assert stored.fault is None
    assert (stored.spec.training.num_generations, stored.spec.training.max_steps) == (4, 7)
    assert together(theirs, used_defaults(stored.spec)) == theirs


@pytest.mark.parametrize("raw", [spec(), WIDE], ids=["small", "wide"])
def test_a_spec_with_the_defaults_that_it_uses_means_the_same(raw: dict[str, Any]) -> None:
    parsed = parse_spec(raw)
    kept = used_defaults(parsed)
    again = parse_spec(with_defaults(GRPOJobSpec, raw, kept))
    assert again == parsed
    lines = default_lines(whole_schema()["properties"]["spec"])
    shown = {path.replace("[]", ""): json.loads(value) for path, value in (line.split(": ", 1) for line in lines)}
    assert {path: shown.get(path) for path in _flat(kept)} == _flat(kept)


def _flat(kept: dict[str, Any], path: str = "") -> dict[str, Any]:
    found = {}
    for key, value in kept.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["training", "inner", "rewards", "kept", "server"]), inner, max_size=3)
    ),
)


@given(JSON, st.dictionaries(st.sampled_from(["training", "rewards", "generation", "image"]), JSON))
def test_whatever_is_stored_a_spec_is_read(raw: object, kept: Any) -> None:
    read_spec(raw, GRPOJobStatus(attempt=0, defaults=kept))


def test_the_crd_has_no_default_of_a_value_but_that_of_the_scale_subresource() -> None:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert list(default_lines(schema)) == ["generation.server.elastic.replicas: 1"]
    assert (schema["properties"]["training"]["default"], schema["properties"]["podTemplate"]["default"]) == ({}, {})


def test_rules_read_an_unset_field_as_its_default_and_descriptions_tell_it() -> None:
    fields = {
        "a": {"type": "integer", "default": 3, "description": "A."},
        "t": {"type": "string", "default": "x", "description": "T."},
        "many": {"type": "array", "items": {"properties": {"b": {"default": 0.5, "description": "B."}}}},
        "names": {"type": "array", "default": ["q"], "description": "N."},
        "free": {"type": "integer"},
    }
    rule = {
        "rule": "self.a > 1 && self.many.all(m, m.b < 1.0) && has(self.free) && self.t.startsWith('self.a')",
        "message": "self.a",
        "messageExpression": "'%d'.format([self.a])",
    }
    looped = {"rule": "self.names.all(n, n != '')", "message": "m"}
    made = without_defaults({"properties": fields, "x-kubernetes-validations": [rule, looped]})
    first, second = made["x-kubernetes-validations"]
    assert first["rule"] == (
        "(has(self.a) ? self.a : 3) > 1 && self.many.all(m, (has(m.b) ? m.b : 0.5) < 1.0) && has(self.free) && "
        "(has(self.t) ? self.t : \"x\").startsWith('self.a')"
    )
    assert (first["message"], first["messageExpression"]) == ("self.a", "'%d'.format([(has(self.a) ? self.a : 3)])")
    assert second["rule"] == "(has(self.names) ? self.names : [\"q\"]).all(n, n != '')"
    assert made["properties"]["a"] == {"type": "integer", "description": "A. Default: 3."}
    assert made["properties"]["many"]["items"]["properties"]["b"] == {"description": "B. Default: 0.5."}
