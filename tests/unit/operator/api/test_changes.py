"""Every field of the spec is frozen, free while the job is suspended, free, or has a rule of its own, and a refusal
compares each of them by itself.
"""

from grpo_operator.api.crd import whole_schema
from grpo_operator.api.job_rules import FREE, FREE_WHILE_SUSPENDED, FROZEN, change_rules
from grpo_operator.api.spec import GRPOJobSpec

SPEC = whole_schema()["properties"]["spec"]


def test_every_field_of_the_spec_says_when_it_may_change() -> None:
    classified = [*FROZEN, *FREE_WHILE_SUSPENDED, *FREE, "managedBy", "generation"]
    fields = [field.alias or name for name, field in GRPOJobSpec.model_fields.items()]
    assert sorted(classified) == sorted(fields)


def test_a_refusal_compares_each_field_below_a_section_that_both_jobs_have() -> None:
    frozen, while_suspended, generation, *_ = (one.get("messageExpression", "") for one in change_rules(SPEC))
    same = "has(self.spec.training.maxSteps) == has(oldSelf.spec.training.maxSteps)"
    assert f"{same} && (!has(self.spec.training.maxSteps)" in frozen
    assert "'rewards '" in frozen
    assert (
        "!(has(self.spec.lora) && has(oldSelf.spec.lora)) || has(self.spec.lora.r) == has(oldSelf.spec.lora.r)"
        in frozen
    )
    assert "'evaluation.dataset.reasoningGym.size '" in frozen
    assert "'podTemplate.tolerations '" in while_suspended
    assert "'generation.server.elastic.maxReplicas '" in generation
    assert "elastic.replicas" not in generation
