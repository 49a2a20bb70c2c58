"""The objects that the chart renders: rights, the operator's pod, the CRD, the NetworkPolicy."""

import re
import subprocess
from collections import defaultdict
from typing import Any

import yaml

from grpo_operator.api import names
from support.control_plane.chart import CHART, helm, render
from support.paths import ROOT

REQUESTS = [f"--request={one}" for one in ("cpu=100m", "cpuPerGpu=1", "memory=256Mi", "memoryPerGpu=4Gi")]


def test_one_release_watches_all_namespaces() -> None:
    objects = render()
    roles = ["ClusterRole", "ClusterRole admin", "ClusterRole edit", "ClusterRole view", "ClusterRoleBinding"]
    crds = [f"CustomResourceDefinition {kind}" for kind in (*names.DEFAULTS_KINDS, names.KIND)]
    own = ["Role leader", "RoleBinding leader", "ServiceAccount"]
    assert sorted(objects) == [*roles, *crds, "Deployment", "PodDisruptionBudget", *own]
    subject = objects["ClusterRoleBinding"]["subjects"][0]
    assert subject == {"kind": "ServiceAccount", "name": "grpo-operator", "namespace": "grpo-system"}
    assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
    assert objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "--lease=grpo-system/grpo-operator",
        "--identity=$(POD_NAME)",
        "--liveness-port=8080",
        "--log-format=full",
        "--log-level=info",
        *REQUESTS,
    ]


def test_the_crds_are_the_generated_ones_and_survive_uninstall() -> None:
    objects = render()
    for kind in (*names.DEFAULTS_KINDS, names.KIND):
        crd = objects[f"CustomResourceDefinition {kind}"]
        source = yaml.safe_load((ROOT / "crds" / f"{crd['metadata']['name']}.yaml").read_text())
        assert crd["spec"] == source["spec"]
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not [name for name in render("--set", "crds.install=false") if "CustomResource" in name]


def test_watched_namespaces_get_a_role_each_and_no_rights_elsewhere() -> None:
    objects = render("--set", "watchNamespaces={team-a,team-b}")
    roles = {name for name in objects if "Role" in name and "leader" not in name}
    bound = {f"{kind} {team}" for kind in ("Role", "RoleBinding") for team in ("team-a", "team-b")}
    assert roles == {"ClusterRole view", "ClusterRole edit", "ClusterRole admin"} | bound
    everywhere = render("--set", "rbac.readNodes=false")["ClusterRole"]["rules"]
    of_clusters = ["resourceflavors", "priorityclasses", "grpoclusterdefaults", "grpoclusterdefaults/status"]
    assert objects["Role team-a"]["rules"] == [one for one in everywhere if one["resources"][0] not in of_clusters]
    assert objects["RoleBinding team-b"]["subjects"][0]["namespace"] == "grpo-system"
    arguments = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert sorted(arguments[5:]) == sorted(["--namespace=team-a", "--namespace=team-b", "--no-nodes", *REQUESTS])
    bare = render("--set", "watchNamespaces={team-a}", "--set", "crds.install=false")
    assert {o["metadata"].get("namespace") for o in bare.values()} == {"team-a", "grpo-system"}


def test_two_releases_with_one_name_in_two_namespaces_share_no_object() -> None:
    def identities(namespace: str, *args: str) -> set[tuple[str, str, str]]:
        objects = render("--set", "crds.install=false", *args, namespace=namespace).values()
        return {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in objects}

    assert identities("one").isdisjoint(identities("two"))
    same_team = ("--set", "watchNamespaces={team}")
    assert render("--set", "watchNamespaces={grpo-system}")["Role leader"]
    assert identities("one", *same_team).isdisjoint(identities("two", *same_team))


def test_roles_grant_no_secrets_no_wildcards_and_no_more_than_is_used() -> None:
    rules = render()["ClusterRole"]["rules"]
    granted = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert {verb for resource, verb in granted if resource == "pods"} == {"list", "watch", "patch", "delete"}
    assert {verb for resource, verb in granted if resource == "persistentvolumeclaims"} == {"get"}
    assert {verb for resource, verb in granted if resource == "grpojobs"} == {"get", "list", "watch", "delete"}
    assert {verb for resource, verb in granted if resource == "nodes"} == {"get"}
    assert not any("*" in part for rule in rules for part in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]])
    assert not any(resource in {"secrets", "pods/exec", "pods/log"} for resource, _ in granted)


def test_the_lease_is_the_releases_own_and_the_right_to_change_it_names_it() -> None:
    objects = render(release="other", namespace="sys")
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][:2] == ["--lease=sys/other-grpo-operator", "--identity=$(POD_NAME)"]
    assert container["env"] == [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    role, binding = objects["Role leader"], objects["RoleBinding leader"]
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    of_this_name = {"resourceNames": ["other-grpo-operator"], "verbs": ["get", "update"]}
    assert role["rules"] == [leases | {"verbs": ["create"]}, leases | of_this_name]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "sys"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == objects["ClusterRoleBinding"]["subjects"]


def test_a_second_pod_stands_by_on_another_node_and_lost_ones_are_replaced_soon() -> None:
    objects = render()
    spec = objects["Deployment"]["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    pod = spec["template"]["spec"]
    soon = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10}
    lost = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    assert pod["tolerations"] == [{"key": key} | soon for key in lost]
    (spread,) = pod["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    budget = objects["PodDisruptionBudget"]["spec"]
    assert budget == {"maxUnavailable": 1, "selector": spec["selector"]}
    assert spread["labelSelector"] == spec["selector"]
    alone = render("--set", "replicas=1")
    assert alone["Deployment"]["spec"]["replicas"] == 1
    assert "PodDisruptionBudget" not in alone


def test_probes_ask_whether_the_operator_lives_and_knows_the_cluster() -> None:
    container = render()["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {"health"}
    paths = {"startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz"}
    assert {kind: probe["path"] for kind, probe in probes.items()} == paths


def test_a_digest_replaces_the_tag() -> None:
    digest = f"sha256:{'0' * 64}"
    spec = render("--set", "image.tag=v9", "--set", f"image.digest={digest}")["Deployment"]["spec"]
    assert spec["template"]["spec"]["containers"][0]["image"] == f"ghcr.io/grpo-operator/operator@{digest}"


def test_kubernetes_own_roles_are_extended_once_in_a_cluster() -> None:
    objects = render()
    assert objects["ClusterRole view"]["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert objects["ClusterRole edit"]["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    edits = {resource for rule in objects["ClusterRole edit"]["rules"] for resource in rule["resources"]}
    assert "grpodefaults" not in edits, "who submits jobs must not change what they are forced to"
    assert objects["ClusterRole admin"]["rules"][0]["resources"] == ["grpodefaults"]
    assert "ClusterRole view" not in render("--set", "rbac.aggregateRoles=false")
    assert "ClusterRole view" in render("--set", "crds.install=false")


def test_helm_test_has_the_right_to_list_pods_only() -> None:
    command = [str(helm()), "template", "one", str(CHART), "--show-only", "templates/tests/check.yaml"]
    done = subprocess.run([*command, "--namespace", "sys"], capture_output=True, text=True, check=True)
    objects = {o["kind"]: o for o in yaml.safe_load_all(done.stdout)}
    assert all(o["metadata"]["annotations"]["helm.sh/hook"] == "test" for o in objects.values())
    assert objects["Role"]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    name = objects["Pod"]["metadata"]["labels"]["app.kubernetes.io/name"]
    assert name != "grpo-operator", "selectors of the operator's pod must not match the pod of the test"


def test_pod_labels_cannot_break_the_selector() -> None:
    spec = render("--set", "podLabels.app\\.kubernetes\\.io/name=other")["Deployment"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_the_network_policy_lets_the_operator_reach_the_api_server_and_pods_of_jobs_alone() -> None:
    def policy(*values: str) -> dict[str, Any]:
        arguments = (f"--set={value}" for value in ("networkPolicy.enabled=true", *values))
        return render(*arguments)["NetworkPolicy"]["spec"]

    assert "NetworkPolicy" not in render()
    ports = [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]
    pods = {"matchLabels": {names.LABEL_MANAGED_BY: names.MANAGER}}
    anywhere = {"podSelector": pods, "namespaceSelector": {}}
    spec = policy()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == [{"ports": ports}, {"ports": [{"protocol": "TCP"}], "to": [anywhere]}]
    narrow = policy("networkPolicy.apiServerCIDRs={10.96.0.1/32,fd00::1/128}", "watchNamespaces={a,b}")["egress"]
    blocks = [{"ipBlock": {"cidr": "10.96.0.1/32"}}, {"ipBlock": {"cidr": "fd00::1/128"}}]
    assert narrow[0] == {"ports": ports, "to": blocks}
    watched = [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}]
    assert narrow[1]["to"] == [{"podSelector": pods, "namespaceSelector": {"matchExpressions": watched}}]
    more = policy("networkPolicy.extraEgress[0].ports[0].port=3128")["egress"]
    assert more[2:] == [{"ports": [{"port": 3128}]}]


def test_the_table_of_rights_in_the_docs_matches_the_roles() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)` \| ([a-z, ]+) \| .+ \|$", text, re.MULTILINE)
    objects = render()
    granted: dict[str, set[str]] = defaultdict(set)
    for rule in objects["ClusterRole"]["rules"] + objects["Role leader"]["rules"]:
        for resource in rule["resources"]:
            granted[resource] |= {*rule["verbs"]}
    assert {resource: set(verbs.split(", ")) for resource, verbs in rows} == granted
