"""Content that other programs wrote is read as far as it can be, and cut to what may be kept."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from grpo_spec import lenient
from grpo_spec.reports import Progress
from grpo_spec.schema import Rule, Section, dump


class Item(Section):
    name: str = Field(max_length=4)
    size: int = Field(1, ge=1, le=9)


class Box(Section):
    RULES = (Rule("true", "items must not be empty", lambda box: bool(box.items)),)

    items: tuple[Item, ...] = Field((), max_length=2)
    first_item: Item | None = None
    limits: dict[str, float] = Field(default_factory=dict, max_length=2)


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        ({"items": [{"name": "a", "size": 3, "colour": 1}], "new": {}}, {"items": [{"name": "a", "size": 3}]}),
        ({"items": [{"name": "much too long", "size": 99}]}, {"items": [{"name": "much", "size": 9}]}),
        ({"items": [{"size": 3}, {"name": "b", "size": 0}, 7]}, {"items": [{"name": "b", "size": 1}]}),
        ({"items": [{"name": n} for n in "abc"]}, {"items": [{"name": "a", "size": 1}, {"name": "b", "size": 1}]}),
        ({"items": None, "firstItem": {"size": 2}, "limits": {"a": "x", "b": 2}}, {"items": [], "limits": {"b": 2.0}}),
        ({"first_item": 4, "limits": {"a": 1, "b": 2, "c": 3}}, {"items": [], "limits": {"a": 1.0, "b": 2.0}}),
        ("no object", {"items": []}),
    ],
)
def test_what_is_wrong_is_cut_or_left_out(raw: Any, read: dict[str, Any]) -> None:
    assert dump(lenient.read(Box, raw)) == {"limits": {}} | read


def test_a_field_without_a_default_is_needed() -> None:
    with pytest.raises(ValueError, match="Item cannot be read: Field required at"):
        lenient.read(Item, {"size": 3})
    assert lenient.read(Item, {"size": 3}, {"name": "x"}) == Item(name="x", size=3)


def test_plain_json_has_no_nulls_and_only_numbers_that_others_can_store() -> None:
    odd = {"a": None, "b": [float("nan"), 1.5, float("inf"), None, True], "c": 10**400, "d": -(10**400)}
    assert lenient.plain(odd) == {"b": [1.5, True], "c": 2**63 - 1, "d": 1 - 2**63}
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert json.dumps(lenient.plain(deep)).count("[") < 100


@given(st.text(max_size=60), st.integers(20, 60))
def test_a_text_is_cut_by_bytes(text: str, limit: int) -> None:
    cut = lenient.clip(text, limit)
    assert len(cut.encode()) <= limit
    assert cut == text or cut.endswith(" [...]")


def test_a_report_of_a_hostile_pod_is_bounded() -> None:
    said = Progress.read(
        {
            "step": 10**30,
            "reward": float("nan"),
            "metrics": {f"m{n}": n for n in range(10_000)} | {"x" * 500: 1.0, "bad": "text"},
            "rankPhases": {"0": "y" * 10**6, "no rank": "z"} | {str(n): "Training" for n in range(1, 10_000)},
            "waitingFor": ["w" * 10**6] * 1000,
            "checkpoint": "c" * 10**6,
            "phase": 7,
        }
    )
    assert (said.step, said.reward, said.phase) == (2**63 - 1, None, "Starting")
    assert all(rank.isdecimal() for rank in said.rank_phases)
    assert len(said.model_dump_json()) < 150_000
    assert Progress.read([]) == Progress.read(None) == Progress()
