"""Asserts that every field of the spec is classified: frozen, free while the job is suspended, or free."""

from grpo_operator.api.job_rules import FREE, FREE_WHILE_SUSPENDED, FROZEN
from grpo_operator.api.spec import GRPOJobSpec


def test_every_field_of_the_spec_says_when_it_may_change() -> None:
    classified = [*FROZEN, *FREE_WHILE_SUSPENDED, *FREE, "managedBy"]
    fields = [field.alias or name for name, field in GRPOJobSpec.model_fields.items()]
    assert sorted(classified) == sorted(fields)
