"""`helm test` names the fields that the CRD of the cluster lacks."""

from copy import deepcopy

from grpo_operator.api.crd import crd
from grpo_operator.runtime.check import missing_fields


def test_a_field_that_the_served_schema_lacks_is_named_at_any_depth() -> None:
    served = deepcopy(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    assert missing_fields(served) == []
    spec = served["properties"]["spec"]["properties"]
    del spec["trainer"]["properties"]["groups"]["items"]["properties"]["gpus"]
    del spec["lora"]
    missing = missing_fields(served)
    assert "spec.trainer.groups.gpus" in missing
    assert "spec.lora" in missing
    assert all(path == "spec.trainer.groups.gpus" or path.startswith("spec.lora") for path in missing)


def test_additional_fields_of_a_newer_schema_are_accepted() -> None:
    served = deepcopy(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    served["properties"]["spec"]["properties"]["later"] = {"type": "string"}
    assert missing_fields(served) == []
