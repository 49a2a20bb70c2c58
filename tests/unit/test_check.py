"""What `helm test` finds missing in the CRD that a cluster serves."""

from copy import deepcopy

from grpo_operator.check import missing_fields
from grpo_operator.crd import crd


def test_a_field_that_the_served_schema_lacks_is_named_wherever_it_is() -> None:
    served = deepcopy(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    assert missing_fields(served) == []
    spec = served["properties"]["spec"]["properties"]
    del spec["trainer"]["properties"]["groups"]["items"]["properties"]["gpus"]
    del spec["lora"]
    missing = missing_fields(served)
    assert "spec.trainer.groups.gpus" in missing
    assert "spec.lora" in missing
    assert all(path == "spec.trainer.groups.gpus" or path.startswith("spec.lora") for path in missing)


def test_fields_that_only_a_newer_schema_has_are_no_fault() -> None:
    served = deepcopy(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    served["properties"]["spec"]["properties"]["later"] = {"type": "string"}
    assert missing_fields(served) == []
