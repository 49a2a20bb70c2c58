"""The names and types by which mypy checks an edit of the status are those of its models."""

from typing import get_type_hints

import pytest

from grpo_operator.api.status import ConditionStatus, GroupStatus, GRPOJobStatus, MemberStatus
from grpo_operator.api.status_section import StatusSection
from grpo_operator.decide import edits


def _of_model(model: type[StatusSection]) -> dict[str, object]:
    hints = get_type_hints(model)
    return {name: hints[name] for name in model.model_fields}


def test_every_field_of_the_status_can_be_updated() -> None:
    assert get_type_hints(edits.StatusFields) == _of_model(GRPOJobStatus)


@pytest.mark.parametrize(
    ("fields", "model"),
    [(edits.ConditionFields, ConditionStatus), (edits.MemberFields, MemberStatus), (edits.GroupFields, GroupStatus)],
)
def test_fields_of_a_part_are_its_models(fields: type, model: type[StatusSection]) -> None:
    assert get_type_hints(fields).items() <= _of_model(model).items()
