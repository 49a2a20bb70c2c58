"""The CRDs of what a site sets take what the operator merges, and are small."""

import json

from grpo_operator.api.names import DEFAULTS_KINDS
from grpo_operator.api.site import BLOCKS, PRICE, QUEUE, SECTIONS
from grpo_operator.api.site_crds import site_crds


def test_both_have_each_section_typed_and_without_defaults_or_rules() -> None:
    crds = site_crds()
    assert tuple(one["spec"]["names"]["kind"] for one in crds) == DEFAULTS_KINDS
    assert [one["spec"]["scope"] for one in crds] == ["Cluster", "Namespaced"]
    for one in crds:
        blocks = one["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        assert tuple(blocks) == BLOCKS
        for block in blocks.values():
            assert tuple(block["properties"]) == (QUEUE, PRICE, *SECTIONS)
            assert all("type" in section for section in block["properties"].values())
        text = json.dumps(blocks, separators=(",", ":"))
        assert '"default":' not in text
        assert text.count("x-kubernetes-validations") == len(BLOCKS)  # of an item: which names env may not have
        assert len(text) < 20_000
