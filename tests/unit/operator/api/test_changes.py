"""Asserts that every field of the spec is frozen, free while the job is suspended, free, or has a rule of its own."""

from grpo_operator.api.job_rules import FREE, FREE_WHILE_SUSPENDED, FROZEN
from grpo_operator.api.spec import GRPOJobSpec


def test_every_field_of_the_spec_says_when_it_may_change() -> None:
    classified = [*FROZEN, *FREE_WHILE_SUSPENDED, *FREE, "managedBy", "generation"]
    fields = [field.alias or name for name, field in GRPOJobSpec.model_fields.items()]
    assert sorted(classified) == sorted(fields)
