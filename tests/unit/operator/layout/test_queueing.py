"""Requests to Kueue, and the additions of its admission to pods."""

from dataclasses import replace
from typing import Any

from grpo_operator.layout.admission import Allowed, find_fault
from grpo_operator.layout.job import Job, Queue
from grpo_operator.layout.queueing import flavors, read_admission, wanted_name, workload
from grpo_operator.layout.topology import plan_topology
from support.control_plane.jobs import job, pod_templates
from support.control_plane.passes import SERVER

FLAVOR = {"spec": {"nodeLabels": {"pool": "h200"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}


def queued(**spec: Any) -> Job:
    """Return a job in a queue."""
    return replace(job(**spec), queue=Queue("team"))


def granted(one: Job, **assigned: Any) -> Job:
    """Return the job with the admission of its Workload, whose assignments have these fields."""
    raw = workload(one, plan_topology(one))
    raw["metadata"]["uid"] = "w"
    assigned |= {"flavors": {"nvidia.com/gpu": "h200"}}
    groups = [{"name": group["name"], **assigned} for group in raw["spec"]["podSets"]]
    updates = [{"name": "a", "labels": {"check": "a"}, "nodeSelector": {"node": "new"}}]
    raw["status"] = {
        "admission": {"clusterQueue": "cq", "podSetAssignments": groups},
        "admissionChecks": [{"name": "provisioning", "podSetUpdates": updates}],
    }
    assert flavors(raw) == {"h200"}
    return replace(one, admission=read_admission(raw, {"h200": FLAVOR}))


def test_each_group_is_a_pod_set_with_the_resources_of_its_pods() -> None:
    elastic = {"replicas": 1, "maxReplicas": 5}
    server = {"topology": "Server", "server": {"groups": [{"name": "gen", "gpus": 4}], "elastic": elastic}}
    one = queued(generation=server, failurePolicy={"onGenerationFailure": "RestartGeneration"})
    sets = workload(one, plan_topology(one))["spec"]["podSets"]
    assert [(each["name"], each["count"]) for each in sets] == [("a", 1), ("b", 1), ("gen", 5)]
    gpus = [each["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for each in sets]
    assert gpus == ["2", "1", "4"]


def test_only_what_kueue_reads_makes_another_request() -> None:
    def name(one: Job) -> str | None:
        return wanted_name(one, plan_topology(one))

    first = name(queued())
    assert name(queued(podTemplate={"env": [{"name": "A", "value": "b"}]}, failurePolicy={"maxRestarts": 9})) == first
    others = {
        name(queued(podTemplate={"nodeSelector": {"a": "b"}})),
        name(queued(scheduling={"topologyKey": "rack"})),
        name(queued(**SERVER)),
        name(replace(job(), queue=Queue("other"))),
        name(replace(job(), queue=Queue("team", "urgent"))),
        name(replace(queued(), uid="a later job of this name")),
    }
    assert len(others | {first}) == 7
    assert name(job()) is None


def test_pods_get_what_flavors_and_checks_say() -> None:
    a, b = pod_templates(granted(queued(podTemplate={"tolerations": [{"key": "mine"}]}))).values()
    assert a["spec"]["nodeSelector"] == {"pool": "h200", "node": "new"}
    assert b["spec"]["nodeSelector"] == {"pool": "h200"}
    assert b["spec"]["tolerations"] == [{"key": "mine"}, {"key": "gpu", "operator": "Exists"}]
    assert a["metadata"]["labels"]["check"] == "a"
    assert b["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "b"
    assert "schedulingGates" not in a["spec"]


def test_topology_key_is_asked_of_kueue_which_then_places_each_pod() -> None:
    near = queued(scheduling={"topologyKey": "rack", "topologyPolicy": "Required"})
    (first, _) = workload(near, plan_topology(near))["spec"]["podSets"]
    assert first["topologyRequest"] == {"required": "rack", "podIndexLabel": "apps.kubernetes.io/pod-index"}
    pod = pod_templates(granted(near, topologyAssignment={"levels": ["rack"]}))["a"]
    assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/topology"}]
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/podset-required-topology"] == "rack"
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == wanted_name(near, plan_topology(near))
    assert "affinity" not in pod["spec"]
    free = pod_templates(granted(queued(), topologyAssignment={"levels": ["rack"]}))["a"]
    assert free["metadata"]["annotations"]["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"


def test_what_kueue_cannot_do_is_refused_and_names_the_label() -> None:
    can = Allowed(queue=True)
    assert find_fault(queued(), can) is None
    assert "install Kueue" in (find_fault(queued(), Allowed()) or "")
    many = queued(trainer={"groups": [{"name": f"g{number}", "gpus": 1} for number in range(19)]})
    assert "at most 18 groups" in (find_fault(many, can) or "")


def test_environment_pods_are_pod_sets_of_their_own_that_need_not_be_near() -> None:
    one = queued(
        tools=[{"function": "m:f"}],
        environmentPods={"groups": [{"name": "boxes", "replicas": 3}]},
        scheduling={"topologyKey": "rack"},
    )
    *_, boxes = workload(one, plan_topology(one))["spec"]["podSets"]
    assert (boxes["name"], boxes["count"]) == ("boxes", 3)
    assert "topologyRequest" not in boxes
    assert boxes["template"]["spec"]["containers"][0]["resources"] == {}
