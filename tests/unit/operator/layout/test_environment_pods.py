"""Environment pods: what they are told and have, and how ranks find them."""

import json
from typing import Any

from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.manifests import manifests
from grpo_operator.layout.topology import plan_topology
from grpo_spec.contract import EnvironmentPodContract
from grpo_spec.trainer import TrainerConfig
from support.control_plane.jobs import job, world

SECRET = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
SPEC: dict[str, Any] = {
    "tools": [{"function": "m:multiply"}],
    "environments": [{"name": "wordle", "factory": "m:Wordle"}, {"name": "sql", "factory": "m:Sql", "env": ["DB"]}],
    "environmentPods": {
        "groups": [
            {"name": "boxes", "replicas": 2, "sessions": 16, "environments": ["sql"]},
            {"name": "rest", "podTemplate": {"env": [{"name": "DB", "value": "sqlite"}], "priorityClassName": "spot"}},
        ]
    },
    "generation": {"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 1}]}},
}
OF_THE_JOB: dict[str, Any] = {
    "podTemplate": {
        "env": [SECRET],
        "envFrom": [{"secretRef": {"name": "buckets"}}],
        "volumes": [{"name": "keys", "secret": {"secretName": "keys"}}],
        "volumeMounts": [{"name": "keys", "mountPath": "/keys"}],
        "initContainers": [{"name": "fetch", "image": "fetch"}],
        "nodeSelector": {"gpu": "h100"},
        "runtimeClassName": "nvidia",
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "pull"}],
    },
    "storage": {"claimName": "runs"},
    "cache": {"claimName": "cache"},
    "network": {"rdmaResource": "rdma/hca", "fabric": "InfiniBand"},
    "scheduling": {"topologyKey": "rack", "gang": "Native"},
}


def _children(attempt: int = 0, **more: Any) -> dict[tuple[str, str], Any]:
    made = job(**SPEC | more)
    found = manifests(made, plan_topology(made), attempt, avoid=["bad"])
    return {(child["kind"], child["metadata"]["name"]): child for child in found}


def test_ranks_read_the_name_of_every_pod_and_what_its_group_serves() -> None:
    boxes, rest = (one.model_dump() for one in make_contract(*world(**SPEC), attempt=0).environment_pods)
    addresses = ("job-boxes-0.job.ns.svc:29502", "job-boxes-1.job.ns.svc:29502")
    assert boxes == {"name": "boxes", "sessions": 16, "environments": ("sql",), "addresses": addresses}
    addresses = ("job-rest-0.job.ns.svc:29502",)
    assert rest == {"name": "rest", "sessions": 64, "environments": ("wordle", "sql"), "addresses": addresses}


def test_a_pod_is_told_what_it_serves_and_nothing_else_of_the_job() -> None:
    told = json.loads(_children()["ConfigMap", "job.boxes"]["data"]["contract.json"])
    assert set(told) == {"job", "group", "port", "sessions", "isLocal", "tools", "environments"}
    assert told["isLocal"] is False, "what runs in the pod would open sessions there"
    read = EnvironmentPodContract.model_validate(told)
    assert (read.group, read.port, read.sessions) == ("boxes", 29502, 16)
    assert [tool.name for tool in read.tools] == ["multiply"]
    assert [one.name for one in read.environments] == ["sql"]
    assert TrainerConfig.model_fields.keys() & set(told) == {"tools", "environments"}


def test_it_has_its_own_settings_and_of_the_jobs_only_the_secrets_for_its_image() -> None:
    children = _children(**OF_THE_JOB)
    template = children["StatefulSet", "job-rest"]["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "grpo_workload.environment_pod"]
    assert {one["name"] for one in container["env"]} == {
        *("POD_NAME", "POD_UID", "GRPO_CONTRACT", "GRPO_TERMINATION_LOG", "HOME"),
        "DB",
    }
    assert pod["volumes"] == [
        {"name": "contract", "configMap": {"name": "job.rest", "defaultMode": 0o444}},
        {"name": "tmp", "emptyDir": {}},
    ]
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/etc/grpo", "/tmp"]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["priorityClassName"] == "spot"
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["resources"] == {}
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "environment", "scheme": "HTTP"}
    assert container["ports"] == [{"name": "environment", "containerPort": 29502, "protocol": "TCP"}]
    of_jobs = {"initContainers", "nodeSelector", "runtimeClassName", "serviceAccountName", "affinity"}
    assert not pod.keys() & {*of_jobs, "schedulingGroup", "resourceClaims", "hostNetwork", "restartPolicy"}
    secrets = json.dumps([template, children["ConfigMap", "job.rest"]])
    assert not [word for word in ("HF_TOKEN", "buckets", "keys", "/data", "/cache") if word in secrets]


def test_they_request_what_pods_without_gpus_do() -> None:
    made = job(**SPEC)
    object.__setattr__(made, "requests", PodRequests())
    found = manifests(made, plan_topology(made), 0)
    (boxes,) = (one for one in found if one["metadata"]["name"] == "job-boxes" and one["kind"] == "StatefulSet")
    requests = {"cpu": "100m", "memory": "256Mi"}
    assert boxes["spec"]["template"]["spec"]["containers"][0]["resources"] == {"requests": requests}


def test_pods_of_an_attempt_are_neither_drawn_to_their_nodes_nor_counted_with_them() -> None:
    """They have nodes first, maybe in racks without GPUs."""
    spread = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    spec = SPEC | {"scheduling": {"topologyKey": "rack", "topologyPolicy": "Required"}}
    spec["podTemplate"] = {"topologySpreadConstraints": [spread]}
    group = {"name": "boxes", "podTemplate": {"topologySpreadConstraints": [spread]}}
    children = _children(**spec | {"environmentPods": {"groups": [group]}})
    trainer, boxes = (children["StatefulSet", name]["spec"]["template"]["spec"] for name in ("job-a", "job-boxes"))
    (near,) = trainer["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    others = {"key": "training.grpo.dev/role", "operator": "NotIn", "values": ["environment"]}
    mine = {"training.grpo.dev/job-uid": "uid"}
    assert near["labelSelector"] == {"matchLabels": mine, "matchExpressions": [others]}
    assert trainer["topologySpreadConstraints"] == [spread | {"labelSelector": near["labelSelector"]}]
    own = {"matchLabels": mine | {"training.grpo.dev/role": "environment"}}
    assert boxes["topologySpreadConstraints"] == [spread | {"labelSelector": own}]
    assert "affinity" not in boxes


def test_no_attempt_changes_them() -> None:
    first, second = _children(0, **OF_THE_JOB), _children(7, **OF_THE_JOB)
    for place in [("StatefulSet", "job-boxes"), ("ConfigMap", "job.boxes"), ("NetworkPolicy", "job.environments")]:
        assert first[place] == second[place]
    assert first["StatefulSet", "job-a"] != second["StatefulSet", "job-a"]
    gang = first["PodGroup", "job-0"]["spec"]["schedulingPolicy"]["gang"]
    assert gang == {"minCount": 3}, "they are no part of it"
    ports = {port["name"]: port["port"] for port in first["Service", "job"]["spec"]["ports"]}
    assert ports["environment"] == 29502


def test_a_job_without_them_has_the_children_that_it_had() -> None:
    made = job(tools=SPEC["tools"])
    children = manifests(made, plan_topology(made), 0)
    assert "environment" not in json.dumps([one for one in children if one["kind"] != "ConfigMap"])
    assert make_contract(made, plan_topology(made), 0).environment_pods == ()
