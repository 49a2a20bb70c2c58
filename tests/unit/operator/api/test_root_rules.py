"""Rules of wide sections are rules of the whole job, none is lost, and each message names all rules that are broken."""

from grpo_operator.api.crd import crd
from grpo_operator.api.job_rules import NAME_RULES, change_rules
from grpo_operator.api.root_rules import RULES, WIDE, skipped_by_the_status
from grpo_operator.api.spec import GRPOJobSpec
from grpo_spec.training import TrainingConfig

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def test_wide_sections_have_no_rules_of_their_own_and_the_job_has_all_of_them() -> None:
    spec = SCHEMA["properties"]["spec"]
    assert RULES not in spec
    assert RULES not in spec["properties"]["training"]
    by_section = {one.get("fieldPath"): one["messageExpression"].replace("\\'", "'") for one in SCHEMA[RULES]}
    for path, model in ((".spec", GRPOJobSpec), (".spec.training", TrainingConfig)):
        for rule in model.RULES:
            assert rule.message.replace("%", "%%") in by_section[path] or rule.message in by_section[path]


def test_a_write_of_the_status_is_asked_for_before_anything_else() -> None:
    assert len(SCHEMA[RULES]) == 2 + len(WIDE)
    assert all(one["rule"].startswith("has(self.status) && (has(self.status.phase) && ") for one in SCHEMA[RULES])


def test_a_rule_names_what_is_broken_and_is_skipped_where_its_section_stays() -> None:
    section = {"properties": {}, RULES: [{"rule": "self.a > 1", "message": "a's form"}]}
    looped = {"rule": "self.l.all(x, x > self.a)", "message": "no", "messageExpression": "'%d'.format([self.a])"}
    wide = {"properties": {"training": section, "generation": section | {RULES: [*section[RULES], looped]}}}
    wide |= {RULES: [{"rule": "self.training.a > self.b", "message": "m"}]}
    (*_, spec, _, generation) = skipped_by_the_status(
        {"properties": {"spec": wide}}, NAME_RULES, change_rules(SCHEMA["properties"]["spec"])
    )
    assert "optional.of(it.training).optMap(training, (" in spec["rule"]
    assert "(training.a > it.b)" in spec["rule"]
    assert "(it.a > 1) ? '' : 'a\\'s form. '" in generation["messageExpression"]
    place = "self.spec.generation"
    assert f"({place}.l.all(x, x > {place}.a)) ? '' : '%s. '.format(['%d'" in generation["messageExpression"]
    assert generation["rule"].endswith(f" || oldSelf.hasValue() && {place} == oldSelf.value().spec.generation")
    assert generation["fieldPath"] == ".spec.generation"
