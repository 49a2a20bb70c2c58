"""A job's children: consistent ranks and pods, owners and labels, merged pod settings."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_operator.api import names
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.job import Queue
from grpo_operator.layout.manifests import manifests
from grpo_operator.layout.topology import plan_topology
from grpo_spec.contract import Contract
from support.control_plane.jobs import job, pod_specs, world

GROUPS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1, max_size=5)


def _groups(shape: list[tuple[int, int]]) -> dict:
    groups = [{"name": f"g{i}", "replicas": replicas, "gpus": gpus} for i, (replicas, gpus) in enumerate(shape)]
    return {"trainer": {"groups": groups}, "training": {"promptsPerStep": 4096}}


@settings(max_examples=25)
@given(GROUPS)
def test_ranks_are_contiguous_and_unique_for_any_groups(shape: list[tuple[int, int]]) -> None:
    made, topology = world(**_groups(shape))
    ranks = [member.rank_offset + local for member in topology.members for local in range(member.gpus)]
    assert ranks == list(range(sum(replicas * gpus for replicas, gpus in shape)))
    contract = make_contract(made, topology, 0)
    assert contract.world_size == len(ranks)
    assert contract.master.host == "job-g0-0.job.ns.svc"
    assert Contract.model_validate_json(contract.model_dump_json(by_alias=True)) == contract


@settings(max_examples=25)
@given(GROUPS)
def test_the_pods_of_the_contract_are_those_of_the_statefulsets(shape: list[tuple[int, int]]) -> None:
    made, topology = world(**_groups(shape))
    sets = [m for m in manifests(made, topology, 0) if m["kind"] == "StatefulSet"]
    pods = {}
    for one in sets:
        (container,) = one["spec"]["template"]["spec"]["containers"]
        for ordinal in range(one["spec"]["replicas"]):
            pods[f"{one['metadata']['name']}-{ordinal}"] = container["resources"]["limits"]["nvidia.com/gpu"]
    assert pods == {member.pod: str(member.gpus) for member in topology.members}


def test_every_child_is_owned_and_has_the_labels_and_annotations_of_the_user_but_the_operators_win() -> None:
    labels = {"team": "x", "tier": "all", names.LABEL_JOB_UID: "mine"}
    made = job(
        commonLabels=labels,
        commonAnnotations={"owner": "me"},
        podTemplate={"labels": {"tier": "pod"}, "annotations": {"port": "1"}},
    )
    *others, group = manifests(made, plan_topology(made), 0)
    for child in [*others, group]:
        assert child["metadata"]["labels"].items() >= {"team": "x", "tier": "all", names.LABEL_JOB_UID: "uid"}.items()
        assert child["metadata"]["annotations"] == {"owner": "me"}
        assert child["metadata"]["ownerReferences"][0]["uid"] == "uid"
        json.dumps(child)
    pod = group["spec"]["template"]["metadata"]
    assert pod["labels"].items() >= {"team": "x", "tier": "pod", names.LABEL_JOB_UID: "uid"}.items()
    assert pod["annotations"] == {"owner": "me", "port": "1"}


def test_the_service_tells_meshes_what_its_ports_speak() -> None:
    server = {"topology": "Server", "server": {"groups": [{"name": "g", "gpus": 1}]}}
    service, *_ = manifests(*world(generation=server), 0)
    spoken = {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}
    assert spoken == {"rendezvous": "tcp", "status": "http", "engine": "http", "transfer": "tcp"}


def test_settings_that_clusters_ask_for_reach_the_pod() -> None:
    own = {"matchLabels": {"a": "b"}}
    spread = [{"topologyKey": "zone", "maxSkew": 1}, {"topologyKey": "rack", "maxSkew": 2, "labelSelector": own}]
    over = {"initContainers": [{"name": "proxy", "image": "p2"}], "privileged": True, "hostNetwork": True}
    made = job(
        podTemplate={
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
            "topologySpreadConstraints": spread,
            "initContainers": [
                {"name": "proxy", "image": "p1", "restartPolicy": "Always"},
                {"name": "sysctl", "image": "s", "securityContext": {"privileged": True}},
            ],
        },
        trainer={"groups": [{"name": "a", "gpus": 7}, {"name": "b", "gpus": 7, "podTemplate": over}]},
    )
    first, second = pod_specs(made).values()
    assert (first["runtimeClassName"], first["schedulerName"]) == ("nvidia", "volcano")
    jobs_pods = {"matchLabels": {names.LABEL_JOB_UID: "uid"}}
    assert [one["labelSelector"] for one in first["topologySpreadConstraints"]] == [jobs_pods, own]
    proxy, sysctl = first["initContainers"]
    assert proxy["restartPolicy"] == "Always"
    assert proxy["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert sysctl["securityContext"] == {"privileged": True}
    assert {"hostNetwork", "dnsPolicy"}.isdisjoint(first)
    assert (second["hostNetwork"], second["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert second["containers"][0]["securityContext"] == {"privileged": True}
    assert [one["image"] for one in second["initContainers"]] == ["p2", "s"]


def test_groups_ask_for_slices_of_gpus_by_the_name_of_their_profile() -> None:
    slices = {"trainer": {"groups": [{"name": "a", "replicas": 2, "gpus": 1}]}}
    made = job(device={"resourceName": "nvidia.com/mig-3g.40gb"}, **slices)
    assert pod_specs(made)["a"]["containers"][0]["resources"] == {
        "limits": {"nvidia.com/mig-3g.40gb": "1"},
        "requests": {"nvidia.com/mig-3g.40gb": "1"},
    }


def test_elastic_engines_are_not_counted_in_a_gang() -> None:
    engines = {"groups": [{"name": "e", "gpus": 1}, {"name": "f", "gpus": 1, "replicas": 2}]}
    elastic = {"replicas": 3, "maxReplicas": 4}
    made, topology = world(
        scheduling={"gang": "Native"},
        generation={"topology": "Server", "server": engines | {"elastic": elastic}},
        failurePolicy={"onGenerationFailure": "RestartGeneration"},
    )
    children = manifests(made, topology, 2)
    (group,) = (child for child in children if child["kind"] == names.GANG_KIND)
    assert group["metadata"]["name"] == "job-2"
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 4}}, "a, b, and two of f"
    sets = {child["metadata"]["name"]: child["spec"] for child in children if child["kind"] == "StatefulSet"}
    joined = {name: spec["template"]["spec"].get("schedulingGroup") for name, spec in sets.items()}
    own = {"podGroupName": "job-2"}
    assert joined == {"job-a": own, "job-b": own, "job-e": None, "job-f": own}
    with pytest.raises(ValueError, match=r"podTemplate\.schedulerName must not be set"):
        job(scheduling={"gang": "Native"}, podTemplate={"schedulerName": "volcano"})


def test_a_gang_has_the_trainers_priority_leaves_whole_and_is_near_each_other_if_it_must() -> None:
    def gang(queue: Queue | None = None, **scheduling: str) -> dict:
        trainers = [
            {"name": "a", "gpus": 1, "podTemplate": {"priorityClassName": "training"}},
            {"name": "b", "gpus": 1},
        ]
        spec = {"trainer": {"groups": trainers}, "podTemplate": {"priorityClassName": "common"}}
        made = replace(job(scheduling={"gang": "Native"} | scheduling, **spec), queue=queue)
        made = manifests(made, plan_topology(made), 0)
        return next(child for child in made if child["kind"] == names.GANG_KIND)["spec"]

    alone = gang()
    assert (alone["disruptionMode"], alone["priorityClassName"]) == ({"all": {}}, "training")
    assert alone == gang(topologyKey="rack"), "a PodGroup cannot say that it prefers a place"
    must = {"topologyKey": "rack", "topologyPolicy": "Required"}
    assert gang(**must) == alone | {"schedulingConstraints": {"topology": [{"key": "rack"}]}}
    assert gang(Queue("team"), **must) == alone, "Kueue chooses the place"


def test_pods_look_for_nodes_near_the_jobs_other_pods_beside_what_the_user_asks() -> None:
    def affinity(**scheduling: str) -> dict:
        users = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
        made = job(scheduling=scheduling, podTemplate={"affinity": {"podAffinity": users, "podAntiAffinity": {"x": 1}}})
        return pod_specs(made, ["lost"])["b"]["affinity"]

    own = {"topologyKey": "rack", "labelSelector": {"matchLabels": {names.LABEL_JOB_UID: "uid"}}}
    key = "DuringSchedulingIgnoredDuringExecution"
    near = affinity(topologyKey="rack")
    assert near["podAffinity"] == {f"preferred{key}": [{"weight": 1}, {"weight": 100, "podAffinityTerm": own}]}
    assert near["podAntiAffinity"] == {"x": 1}
    assert f"preferred{key}" in near["nodeAffinity"], "away from the lost node"
    must = affinity(topologyKey="rack", topologyPolicy="Required")["podAffinity"]
    assert must == {f"preferred{key}": [{"weight": 1}], f"required{key}": [own]}
    assert affinity()["podAffinity"] == {f"preferred{key}": [{"weight": 1}]}
    with pytest.raises(ValueError, match="topologyPolicy Required needs topologyKey"):
        affinity(topologyPolicy="Required")


def test_a_groups_pod_settings_are_merged_like_a_strategic_merge_patch() -> None:
    over = {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}], "resources": {"limits": {"cpu": "8"}}, "tolerations": []}
    made = job(
        podTemplate={
            "nodeSelector": {"pool": "h100"},
            "tolerations": [{"key": "gpu"}],
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "HF_HOME", "value": "/mine"}],
            "resources": {"limits": {"memory": "64Gi"}},
        },
        trainer={"groups": [{"name": "a", "gpus": 7, "podTemplate": over}]},
    )
    template = pod_specs(made)["a"]
    container = template["containers"][0]
    assert template["nodeSelector"] == {"pool": "h100"}
    assert "tolerations" not in template
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert (env["NCCL_DEBUG"], env["HF_HOME"]) == ("INFO", "/mine")
    assert len(env) == len(container["env"])
    assert container["resources"]["limits"] == {"memory": "64Gi", "cpu": "8", "nvidia.com/gpu": "7"}


def test_nulls_remove_what_lies_below_and_items_without_a_key_are_kept() -> None:
    over = {
        "resources": {"limits": None},
        "affinity": {"nodeAffinity": None, "podAffinity": None},
        "volumes": [{"emptyDir": {"medium": None}}, {"name": {}}],
        "nodeSelector": {},
    }
    made = job(
        podTemplate={
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
            "resources": {"limits": {"memory": "1Gi"}},
            "volumes": [{"emptyDir": {}}, {"name": "v"}],
        },
        trainer={"groups": [{"name": "a", "gpus": 7, "podTemplate": over}]},
    )
    template = pod_specs(made)["a"]
    gpus = {"nvidia.com/gpu": "7"}
    assert template["containers"][0]["resources"] == {"limits": gpus, "requests": gpus}
    assert "affinity" not in template
    assert template["volumes"][-4:] == [{"emptyDir": {}}, {"name": "v"}, {"emptyDir": {}}, {"name": {}}]
    json.dumps(pod_specs(made, ["lost-node"]))


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ({"resources": {"limits": [1]}}, "podTemplate.resources.limits must be an object, as in a pod; found [1]"),
        ({"affinity": {"nodeAffinity": "x"}}, "podTemplate.affinity.nodeAffinity must be an object"),
        (
            {"volumes": [{"name": f"v{n}"} for n in range(60)]},
            "merged over spec.podTemplate: podTemplate.volumes: Tuple should have at most 64 items",
        ),
    ],
)
def test_settings_that_no_pod_has_are_refused_with_their_field(template: dict, fault: str) -> None:
    volumes = {"volumes": [{"name": f"w{n}"} for n in range(60)]}
    made = job(podTemplate=volumes, trainer={"groups": [{"name": "a", "gpus": 3, "podTemplate": template}]})
    with pytest.raises(ValueError, match=re.escape(fault)):
        manifests(made, plan_topology(made), 0)


def test_a_cpu_job_requests_no_gpu_by_default() -> None:
    assert pod_specs(job(device={"type": "cpu"}))["b"]["containers"][0]["resources"] == {}


def test_a_claim_template_replaces_the_extended_resource_in_its_group_alone() -> None:
    groups = [{"name": "a", "gpus": 2, "resourceClaimTemplateName": "two"}, {"name": "b", "gpus": 1}]
    a, b = pod_specs(job(trainer={"groups": groups})).values()
    assert a["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "two"}]
    assert a["containers"][0]["resources"] == {"claims": [{"name": "gpus"}]}
    assert "resourceClaims" not in b
    assert b["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
