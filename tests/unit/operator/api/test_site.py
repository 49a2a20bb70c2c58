"""Defaults of a site: which layer wins, what is refused, and which object a value is from."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.api.names import DEFAULTS_KINDS
from grpo_operator.api.site import REQUIRED, find_refusal, merged, origins, price_of, queue_of
from grpo_operator.api.site_objects import find_fault, layer
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import read_spec

CLUSTER, NAMESPACE = DEFAULTS_KINDS
TEXTS = st.sampled_from(["a", "b", "c"])
MAPS = st.dictionaries(TEXTS, TEXTS, max_size=2)
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "nodeSelector": MAPS,
        "schedulerName": TEXTS,
        "tolerations": st.lists(st.fixed_dictionaries({"key": TEXTS}), max_size=2, unique_by=str),
        "env": st.lists(
            st.fixed_dictionaries({"name": TEXTS, "value": TEXTS}), max_size=2, unique_by=lambda e: e["name"]
        ),
    },
)
PARTS = st.fixed_dictionaries({}, optional={"image": TEXTS, "commonLabels": MAPS, "podTemplate": TEMPLATES})
LAYERS = st.dictionaries(
    st.sampled_from(DEFAULTS_KINDS), st.fixed_dictionaries({}, optional={"defaults": PARTS, "enforced": PARTS})
)


def _job(**spec: Any) -> dict[str, Any]:
    return REQUIRED | spec


def _group(template: dict[str, Any]) -> dict[str, Any]:
    return {"trainer": {"groups": [{"name": "a", "gpus": 1, "podTemplate": template}]}}


@given(PARTS, LAYERS)
def test_what_is_merged_is_valid_and_stays_when_it_is_merged_again(job: dict[str, Any], layers: dict[str, Any]) -> None:
    once = merged(_job(**job), layers)
    assert merged(once, layers) == once
    assert read_spec(_job(**job), GRPOJobStatus(), layers).fault is None


@given(PARTS, PARTS, PARTS)
def test_a_job_wins_over_defaults_and_a_namespace_over_the_cluster(
    job: dict[str, Any], near: dict[str, Any], far: dict[str, Any]
) -> None:
    found = merged(_job(**job), {CLUSTER: {"defaults": far}, NAMESPACE: {"defaults": near}})
    if values := [one["image"] for one in (job, near, far) if "image" in one]:
        assert found["image"] == values[0]
    labels = [one.get("commonLabels", {}) for one in (far, near, job)]
    assert (found.get("commonLabels") or {}) == labels[0] | labels[1] | labels[2]
    for item in job.get("podTemplate", {}).get("env", []):
        assert item in found["podTemplate"]["env"]


@given(PARTS, PARTS)
def test_a_job_that_is_not_refused_has_all_that_is_enforced(job: dict[str, Any], enforced: dict[str, Any]) -> None:
    layers = {CLUSTER: {"enforced": enforced}}
    forced = merged(_job(**job), layers)
    assert find_refusal(forced, "", layers) is None
    if find_refusal(_job(**job), "", layers) is None:
        lower = merged(_job(**job), {CLUSTER: {"defaults": enforced}})
        assert _sorted(lower) == _sorted(forced)


def _sorted(spec: dict[str, Any]) -> str:
    """Return a spec as text, whatever the order of its lists."""
    template = {name: sorted(map(str, one)) for name, one in (spec.get("podTemplate") or {}).items()}
    return json.dumps(spec | {"podTemplate": template}, sort_keys=True)


def test_what_is_enforced_otherwise_is_refused_by_field_and_object() -> None:
    layers = {CLUSTER: {"enforced": {"queue": "gpus", "image": "mirror/x", "podTemplate": {"schedulerName": "s"}}}}
    layers[NAMESPACE] = {"defaults": {"image": "other"}}
    said = find_refusal(_job(image="mine", **_group({"schedulerName": "mine"})), "ours", layers)
    enforces = f"{CLUSTER} default enforces"
    for one in (
        f"spec.image: {enforces} mirror/x",
        f"metadata.labels[kueue.x-k8s.io/queue-name]: {enforces} gpus",
        f"spec.trainer.groups[0].podTemplate.schedulerName: {enforces} s",
        f"{NAMESPACE} default, spec.defaults.image: {enforces} mirror/x",
    ):
        assert one in said
    assert queue_of("ours", layers) == "gpus"


def test_a_group_can_neither_remove_nor_hide_what_is_enforced() -> None:
    """Over the job's podTemplate, a null of a group removes a value, and another form replaces a map."""
    layers = {
        CLUSTER: {"enforced": {"podTemplate": {"securityContext": {"runAsUser": 7, "capabilities": {"drop": 1}}}}}
    }
    for name, own in (("runAsUser", None), ("capabilities", None), ("capabilities", [])):
        said = find_refusal(_job(**_group({"securityContext": {name: own}})), "", layers)
        assert said.startswith(f"spec.trainer.groups[0].podTemplate.securityContext.{name}")
        assert f"{CLUSTER} default enforces" in said


def test_labels_and_annotations_of_pods_do_not_replace_common_ones_that_are_enforced() -> None:
    layers = {CLUSTER: {"enforced": {"commonLabels": {"cost": "site"}, "commonAnnotations": {"cost": "site"}}}}
    own = {"labels": {"cost": "mine", "more": "b"}, "annotations": {"cost": "mine"}}
    for root, job in (("spec", _job(podTemplate=own)), ("spec.trainer.groups[0]", _job(**_group(own)))):
        said = find_refusal(job, "", layers)
        assert said.split("; ")[::2] == [
            f"{root}.podTemplate.{name}.cost: {CLUSTER} default enforces site" for name in ("labels", "annotations")
        ]
    same = {"labels": {"cost": "site"}}
    assert find_refusal(_job(podTemplate=same), "", layers) is None
    layers[CLUSTER]["enforced"]["podTemplate"] = {"labels": {"cost": "mine"}}  # the site itself wants another on pods
    assert find_refusal(_job(podTemplate={"labels": {"cost": "mine"}}), "", layers) is None


def test_a_default_label_of_pods_does_not_hide_a_common_one_that_another_layer_enforces() -> None:
    below = {"podTemplate": {"labels": {"cost": "cluster", "more": "b"}}}
    layers = {CLUSTER: {"defaults": below}, NAMESPACE: {"enforced": {"commonLabels": {"cost": "namespace"}}}}
    assert find_refusal(_job(), "", layers) is None
    assert merged(_job(), layers)["podTemplate"]["labels"] == {"cost": "namespace", "more": "b"}


def test_tolerations_of_a_group_do_not_replace_those_of_the_site() -> None:
    spec = _job(**_group({"tolerations": [{"key": "mine"}]}))
    found = merged(spec, {NAMESPACE: {"defaults": {"podTemplate": {"tolerations": [{"key": "gpu"}]}}}})
    assert found["trainer"]["groups"][0]["podTemplate"]["tolerations"] == [{"key": "gpu"}, {"key": "mine"}]
    assert spec["trainer"]["groups"][0]["podTemplate"]["tolerations"] == [{"key": "mine"}]  # the stored one


def test_each_value_says_where_it_is_from() -> None:
    layers = {
        CLUSTER: {"defaults": {"image": "far", "queue": "gpus"}, "enforced": {"podTemplate": {"schedulerName": "s"}}},
        NAMESPACE: {"defaults": {"image": "near", "commonLabels": {"team": "a"}}},
    }
    assert [(one.field, one.value, one.kind, one.enforced) for one in origins(_job(), "", layers)] == [
        ("metadata.labels[kueue.x-k8s.io/queue-name]", "gpus", CLUSTER, False),
        ("spec.image", "near", NAMESPACE, False),
        ("spec.commonLabels.team", "a", NAMESPACE, False),
        ("spec.podTemplate.schedulerName", "s", CLUSTER, True),
    ]


def test_what_may_not_be_set_is_named_and_no_job_begins_with_it() -> None:
    wrong = {"defaults": {"training": {}, "podTemplate": {"node_selector": {}}}, "force": {}}
    said = find_fault(wrong)
    for one in ("spec.force: unknown field", "spec.defaults.training: cannot be set here", "mean nodeSelector?"):
        assert one in said
    found = layer({"metadata": {"generation": 2}, "spec": wrong})
    assert f"{CLUSTER} default is not valid" in (read_spec(_job(), GRPOJobStatus(), {CLUSTER: found}).refused or "")


def test_a_job_keeps_the_layers_that_it_began_with() -> None:
    begun = GRPOJobStatus(attempt=0, site={CLUSTER: {"generation": 1, "defaults": {"image": "then"}}})
    assert read_spec(_job(), begun).spec.image == "then"
    assert read_spec(_job(image="mine"), begun).spec.image == "mine"


def test_a_price_is_the_sites_and_is_shown_as_such() -> None:
    layers: dict[str, Any] = {CLUSTER: {"defaults": {"gpuHourPrice": "2.50 EUR"}}}
    assert price_of(layers) == (2.5, "EUR")
    assert [(one.field, one.value) for one in origins(_job(), "", layers)] == [("price of a GPU hour", "2.50 EUR")]
    assert merged(_job(), layers) == _job()
    assert price_of({NAMESPACE: {"defaults": {"gpuHourPrice": "3 USD"}}} | layers) == (3.0, "USD")
    assert price_of({}) is None
    fault = find_fault({"defaults": {"gpuHourPrice": "much"}})
    assert fault == "spec.defaults.gpuHourPrice: must be an amount and a currency, such as 2.50 EUR"
