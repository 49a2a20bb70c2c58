"""Names of all children keep Kubernetes' limits, and podTemplate reaches no node and no credentials unless allowed."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.api import names
from grpo_operator.layout.admission import Allowed, find_fault
from grpo_operator.layout.job import Job
from grpo_operator.layout.manifests import manifests
from grpo_operator.layout.topology import plan_topology
from support.control_plane.jobs import job, pod_specs

LABEL = 63
REVISION = len("-5b9f7c6d4c")
"""Length of what the label controller-revision-hash adds to the name of a StatefulSet."""

TRAINER = {"groups": [{"name": "t" * 20, "gpus": 2, "replicas": 2}]}
SHAPES: list[dict[str, Any]] = [
    {"generation": {"topology": "Server", "server": {"groups": [{"name": "g", "gpus": 1}]}}},
    {"generation": {"topology": "Server", "server": {"groups": [{"name": "e" * 20, "gpus": 1, "replicas": 4096}]}}},
    {"generation": {"topology": "NodeLocal", "nodeLocal": {"gpusPerNode": 1}}, "trainer": TRAINER},
    {},
]
HOST = {"name": "h", "hostPath": {"path": "/"}}
TOKEN = {"name": "t", "projected": {"sources": [{"configMap": {"name": "c"}}, {"serviceAccountToken": {"path": "t"}}]}}


INIT = "spec.podTemplate.initContainers[1]"


def _init(context: dict[str, Any], **more: Any) -> dict[str, Any]:
    container = {"name": "b", "image": "i", "securityContext": context, **more}
    return {"podTemplate": {"initContainers": [{"name": "a", "image": "i"}, container]}}


def _volumes(*volumes: dict[str, Any]) -> dict[str, Any]:
    return {"podTemplate": {"volumes": [*volumes]}}


def _named(length: int, shape: dict[str, Any]) -> Job:
    return replace(job(**shape), name="j" * length)


@given(st.integers(1, 63), st.sampled_from(SHAPES))
def test_every_name_of_an_accepted_job_keeps_kubernetes_limits(length: int, shape: dict[str, Any]) -> None:
    made = _named(length, shape)
    topology = plan_topology(made)
    sets = [group.statefulset for group in topology.groups]
    fault = find_fault(made, Allowed())
    assert (fault is None) == (max(map(len, sets)) <= names.MAX_CHILD_NAME)
    if fault is None:
        assert all(len(name) + REVISION <= LABEL for name in sets)
        assert all(len(name) <= LABEL for name in topology.pods), "a pod's name is its host name, and a label"
        assert all(len(child["metadata"]["name"]) <= LABEL for child in manifests(made, topology, 10**6))


def test_the_group_whose_name_does_not_fit_is_named_with_the_limit() -> None:
    fault = find_fault(_named(32, SHAPES[1]), Allowed())
    assert f"the name of the group {'e' * 20} must have at most 51 characters together" in fault
    assert find_fault(_named(31, SHAPES[1]), Allowed()) is None
    bad = find_fault(replace(job(), name="1job"), Allowed())
    assert bad.startswith("metadata.name must start with a letter")


@pytest.mark.parametrize(
    ("spec", "where", "needed"),
    [
        (_volumes({"name": "a", "emptyDir": {}}, HOST), "spec.podTemplate.volumes[1].hostPath", "host_path"),
        (
            {"trainer": {"groups": [{"name": "a", "gpus": 2} | _volumes(HOST)]}},
            "spec.trainer.groups[0].podTemplate.volumes[0].hostPath",
            "host_path",
        ),
        (
            {"generation": {"topology": "Server", "server": {"groups": [{"name": "g", "gpus": 1} | _volumes(TOKEN)]}}},
            "spec.generation.server.groups[0].podTemplate.volumes[0].projected.sources[1].serviceAccountToken",
            "service_account_token",
        ),
        (
            _volumes({"name": "c", "projected": {"sources": [{"podCertificate": {}}]}}),
            "spec.podTemplate.volumes[0].projected.sources[0].podCertificate",
            "service_account_token",
        ),
        ({"podTemplate": {"hostNetwork": True}}, "spec.podTemplate.hostNetwork", "host_network"),
        ({"podTemplate": {"privileged": True}}, "spec.podTemplate.privileged", "privileged"),
        (_init({"privileged": True}), f"{INIT}.securityContext.privileged", "privileged"),
        (_init({"capabilities": {"add": ["SYS_ADMIN"]}}), f"{INIT}.securityContext.capabilities.add", "privileged"),
        (_init({}, ports=[{"hostPort": 80}]), f"{INIT}.ports[0].hostPort", "host_network"),
    ],
)
def test_nodes_and_credentials_need_the_administrators_leave(spec: dict[str, Any], where: str, needed: str) -> None:
    made = job(**spec)
    fault = find_fault(made, Allowed())
    assert fault.startswith(f"{where}: ")
    assert re.findall(r"jobs\.allow(\w+)", fault)[0].lower() == needed.replace("_", "")
    assert find_fault(made, Allowed(**{needed: True})) is None
    others = {field.name: True for field in fields(Allowed) if field.name != needed}
    assert find_fault(made, Allowed(**others)) == fault


def test_a_gang_needs_a_cluster_that_has_them() -> None:
    made = job(scheduling={"gang": "Native"})
    assert "did not serve PodGroups (scheduling.k8s.io/v1beta1 or scheduling.k8s.io/v1alpha2)" in (
        find_fault(made, Allowed()) or ""
    )
    assert find_fault(made, Allowed(gang=True)) is None


@pytest.mark.parametrize(
    "volume",
    [
        {"name": "s", "secret": {"secretName": "s"}},
        {"name": "n", "hostPath": None, "projected": None},
        {"name": "p", "projected": {"sources": None}},
        {"name": "q", "projected": {"sources": [None, "text", {"secret": {"name": "s"}}]}},
        {"name": "r", "projected": "text"},
    ],
)
def test_other_volumes_are_left_to_the_api_server(volume: dict[str, Any]) -> None:
    assert find_fault(job(podTemplate={"volumes": [volume]}), Allowed()) is None
    odd = {**volume, "securityContext": {"privileged": False, "capabilities": {"add": None}}, "ports": "text"}
    assert find_fault(job(podTemplate={"initContainers": [odd, {"securityContext": "x"}]}), Allowed()) is None


@pytest.mark.parametrize("field", ["hostPID", "hostIPC", "automountServiceAccountToken"])
def test_pod_templates_have_no_field_for_processes_of_the_host_or_the_account(field: str) -> None:
    with pytest.raises(ValueError, match=rf"spec\.podTemplate\.{field}|spec\.podTemplate\.host"):
        job(podTemplate={field: True})


def test_names_of_existing_objects_may_have_dots() -> None:
    dotted = "team.example.com-runs.v2"
    made = job(
        storage={"claimName": dotted},
        cache={"claimName": dotted, "readOnly": True},
        podTemplate={"priorityClassName": dotted, "serviceAccountName": dotted},
    )
    pod = pod_specs(made)["a"]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == (dotted, dotted)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": dotted}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": dotted, "readOnly": True}
    (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "cache"]
    assert mount["readOnly"] is True
    for wrong in ("a..b", ".a", "a.", "A", "a_b", "a" * 254):
        with pytest.raises(ValueError, match=r"spec\.storage\.claimName"):
            job(storage={"claimName": wrong})


def test_a_run_to_continue_needs_storage_that_may_hold_it() -> None:
    run = {"resumeFrom": "ns/other/5d1c"}
    assert "spec.storage.resumeFrom: pods have no storage" in (find_fault(job(storage=run), Allowed()) or "")
    assert find_fault(job(storage=run | {"claimName": "runs"}), Allowed()) is None
