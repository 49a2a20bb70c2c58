"""What the chart renders, by helm itself."""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import world

from grpo_devcluster import binaries
from grpo_operator import names
from grpo_operator.builders import manifests

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "grpo-operator"


@pytest.fixture(scope="module")
def helm() -> Path:
    try:
        return binaries.binary("helm")
    except FileNotFoundError:
        pytest.skip("helm is not built: make binaries")


class Yaml12(yaml.SafeLoader):
    """Reads numbers as Kubernetes does: PyYAML takes helm's 1e-06 for a string."""


Yaml12.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789"))


def _name(o: dict[str, Any]) -> str:
    end = o["metadata"]["name"].rpartition("-")[2]
    if o["kind"] == "ClusterRole" and end in ("view", "edit"):
        return f"ClusterRole {end}"
    return f"{o['kind']} {o['metadata'].get('namespace', '')}".strip() if "Role" in o["kind"] else str(o["kind"])


def render(helm: Path, *args: str, release: str = "grpo-operator", namespace: str = "grpo-system") -> dict[str, dict[str, Any]]:
    """Objects by kind, roles by kind and namespace, aggregated ones by kind and their name's end; `helm test` not among them."""
    command = [str(helm), "template", release, str(CHART), "--skip-tests", "--namespace", namespace, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    objects = [o for o in yaml.load_all(done.stdout, Yaml12) if o]
    named = {_name(o): o for o in objects}
    assert len(named) == len(objects)
    return named


def test_one_release_watches_all_namespaces(helm: Path) -> None:
    objects = render(helm)
    roles = ["ClusterRole", "ClusterRole edit", "ClusterRole view", "ClusterRoleBinding"]
    assert sorted(objects) == [*roles, "CustomResourceDefinition", "Deployment", "ServiceAccount"]
    subject = objects["ClusterRoleBinding"]["subjects"][0]
    assert subject == {"kind": "ServiceAccount", "name": "grpo-operator", "namespace": "grpo-system"}
    assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
    assert objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"] == ["--liveness-port=8080", "--log-format=full"]


def test_the_crd_is_the_generated_one_and_survives_uninstall(helm: Path) -> None:
    crd = render(helm)["CustomResourceDefinition"]
    source = yaml.safe_load((ROOT / "crds" / "grpojobs.training.grpo.dev.yaml").read_text())
    assert crd["spec"] == source["spec"]
    assert crd["metadata"]["name"] == source["metadata"]["name"]
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert "CustomResourceDefinition" not in render(helm, "--set", "crds.install=false")


def test_watched_namespaces_get_a_role_each_and_no_rights_elsewhere(helm: Path) -> None:
    objects = render(helm, "--set", "watchNamespaces={team-a,team-b}")
    roles = {name for name in objects if "Role" in name}
    assert roles - {"ClusterRole view", "ClusterRole edit"} == {"Role team-a", "Role team-b", "RoleBinding team-a", "RoleBinding team-b"}
    assert objects["Role team-a"]["rules"] == render(helm, "--set", "rbac.readNodes=false")["ClusterRole"]["rules"]
    assert objects["RoleBinding team-b"]["subjects"][0]["namespace"] == "grpo-system"
    arguments = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[2:] == ["--namespace=team-a", "--namespace=team-b", "--no-nodes"]
    bare = render(helm, "--set", "watchNamespaces={team-a}", "--set", "crds.install=false")
    assert {o["metadata"].get("namespace") for o in bare.values()} == {"team-a", "grpo-system"}


def test_two_releases_of_one_name_in_two_namespaces_share_no_object(helm: Path) -> None:
    def identities(namespace: str, *args: str) -> set[tuple[str, str, str]]:
        objects = render(helm, "--set", "crds.install=false", *args, namespace=namespace).values()
        return {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in objects}

    assert identities("one").isdisjoint(identities("two"))
    same_team = ("--set", "watchNamespaces={team}")
    assert identities("one", *same_team).isdisjoint(identities("two", *same_team))


def test_roles_grant_no_secrets_and_no_wildcards_and_no_more_than_is_used(helm: Path) -> None:
    rules = render(helm)["ClusterRole"]["rules"]
    granted = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert {verb for resource, verb in granted if resource == "pods"} == {"list", "watch", "delete"}
    assert {verb for resource, verb in granted if resource == "persistentvolumeclaims"} == {"get"}
    assert {verb for resource, verb in granted if resource == "grpojobs"} == {"get", "list", "watch", "delete"}
    assert {verb for resource, verb in granted if resource == "nodes"} == {"get"}
    assert not any("*" in part for rule in rules for part in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]])
    assert not any(resource in {"secrets", "pods/exec", "pods/log"} for resource, _ in granted)


def test_one_operator_at_a_time_behind_probes(helm: Path) -> None:
    spec = render(helm)["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    container = spec["template"]["spec"]["containers"][0]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert probes == [{"path": "/healthz", "port": "health"}] * 3


def test_values_reach_the_pod(helm: Path) -> None:
    values = ["image.tag=v9", "image.pullSecrets[0].name=reg", "priorityClassName=high", "nodeSelector.disk=ssd", "podLabels.team=x"]
    values += ["tolerations[0].operator=Exists", "env[0].name=HTTPS_PROXY", "env[0].value=p", "logFormat=json", "commonLabels.cost=ml"]
    values += ["podSecurityContext.runAsUser=null", "rbac.readNodes=false", "jobs.networkPolicy=false"]
    objects = render(helm, *(part for value in values for part in ("--set", value)))
    assert all(o["metadata"]["labels"]["cost"] == "ml" for o in objects.values())
    template = objects["Deployment"]["spec"]["template"]
    pod = template["spec"]
    assert pod["containers"][0]["image"] == "ghcr.io/grpo-operator/operator:v9"
    assert pod["imagePullSecrets"] == [{"name": "reg"}]
    assert (pod["priorityClassName"], pod["nodeSelector"]) == ("high", {"disk": "ssd"})
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["containers"][0]["env"] == [{"name": "HTTPS_PROXY", "value": "p"}]
    assert template["metadata"]["labels"].items() >= {"team": "x", "cost": "ml"}.items()
    assert pod["containers"][0]["args"][1:] == ["--log-format=json", "--no-nodes", "--no-network-policies"]
    assert "runAsUser" not in pod["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_a_digest_decides_over_a_tag(helm: Path) -> None:
    digest = f"sha256:{'0' * 64}"
    spec = render(helm, "--set", "image.tag=v9", "--set", f"image.digest={digest}")["Deployment"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == f"ghcr.io/grpo-operator/operator@{digest}"


def test_kubernetes_own_roles_are_extended_once_in_a_cluster(helm: Path) -> None:
    objects = render(helm)
    assert objects["ClusterRole view"]["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert objects["ClusterRole edit"]["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert "ClusterRole view" not in render(helm, "--set", "rbac.aggregateRoles=false")
    assert "ClusterRole view" in render(helm, "--set", "crds.install=false")


def test_the_installations_test_has_rights_to_look_for_pods_alone(helm: Path) -> None:
    command = [str(helm), "template", "one", str(CHART), "--show-only", "templates/tests/check.yaml", "--namespace", "sys"]
    objects = {o["kind"]: o for o in yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout)}
    assert all(o["metadata"]["annotations"]["helm.sh/hook"] == "test" for o in objects.values())
    assert objects["Role"]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    labels = objects["Pod"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] != "grpo-operator"  # or policies and selectors of the operator's pod would take it for one


def _described(schema: dict[str, Any], path: str = "") -> dict[str, str]:
    """Descriptions of the schema's values by path; sections without one of their own are entered."""
    found = {}
    for name, node in schema["properties"].items():
        if "description" in node:
            found[f"{path}{name}"] = node["description"]
        else:
            found |= _described(node, f"{path}{name}.")
    return found


def _commented(lines: list[str]) -> dict[str, str]:
    """Comments of values.yaml by the path of the value that follows them."""
    found, stack, pending = {}, [], []
    for line in lines:
        if begun := re.match(r" *# -- (.*)", line):
            pending = [begun[1]]
        elif more := re.match(r" *# (.*)", line):
            pending.append(more[1])
        elif key := re.match(r"( *)(\w+):", line):
            stack = [*stack[: len(key[1]) // 2], key[2]]
            if pending:
                found[".".join(stack)] = " ".join(pending)
            pending = []
    return found


def test_every_value_is_documented_and_in_the_schema_with_the_same_words() -> None:
    """Helm refuses values that the schema does not name; what values.yaml says of each, editors show from the schema."""
    comments = _commented((CHART / "values.yaml").read_text().splitlines())
    described = _described(json.loads((CHART / "values.schema.json").read_text()))
    del described["global"]
    assert described == comments

    def leaves(node: dict[str, Any], path: str = "") -> set[str]:
        paths = {f"{path}{key}": value for key, value in node.items()}
        open_sections = {p: v for p, v in paths.items() if p not in comments}
        assert all(isinstance(v, dict) and v for v in open_sections.values()), f"no comment: {sorted(open_sections)}"
        return (paths.keys() & comments.keys()).union(*(leaves(v, f"{p}.") for p, v in open_sections.items()))

    assert leaves(yaml.safe_load((CHART / "values.yaml").read_text())) == comments.keys()


def test_pod_labels_cannot_break_the_selector(helm: Path) -> None:
    spec = render(helm, "--set", "podLabels.app\\.kubernetes\\.io/name=other")["Deployment"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_network_policy_lets_progress_through(helm: Path) -> None:
    assert "NetworkPolicy" not in render(helm)
    spec = render(helm, "--set", "networkPolicy.enabled=true")["NetworkPolicy"]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"][1]["to"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/managed-by": "grpo-operator"}


MONITORING = ["metrics.enabled", *(f"metrics.{o}.enabled" for o in ("serviceMonitor", "podMonitor", "prometheusRule", "grafanaDashboard"))]


def _monitoring(*values: str) -> list[str]:
    return [part for value in [*(f"{name}=true" for name in MONITORING), *values] for part in ("--set", value)]


def test_metrics_are_off_and_all_of_them_can_be_on(helm: Path) -> None:
    kinds = {"Service", "ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}
    assert not kinds & render(helm).keys()
    objects = render(helm, *_monitoring("metrics.port=9100", "metrics.podMonitor.labels.release=prometheus"))
    assert kinds <= objects.keys()
    pod = objects["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert "--metrics-port=9100" in container["args"]
    (port,) = [port["name"] for port in container["ports"] if port["containerPort"] == 9100]
    service = objects["Service"]
    assert service["spec"]["ports"][0]["targetPort"] == port
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    monitor = objects["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert objects["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    assert objects["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_launchers_are_found_by_the_labels_and_the_port_that_their_pods_have(helm: Path) -> None:
    made, topology = world()
    templates = [child["spec"]["template"] for child in manifests(made, topology, 0) if child["kind"] == "StatefulSet"]
    monitor = render(helm, *_monitoring())["PodMonitor"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    for template in templates:
        assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert endpoint["port"] in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    label = endpoint["relabelings"][0]["sourceLabels"][0].removeprefix("__meta_kubernetes_pod_label_")
    assert label == re.sub(r"\W", "_", names.LABEL_JOB)
    assert monitor["namespaceSelector"] == {"any": True}
    chosen = render(helm, *_monitoring("watchNamespaces={a,b}"))["PodMonitor"]["spec"]["namespaceSelector"]
    assert chosen == {"matchNames": ["a", "b"]}


def test_network_policy_lets_a_scrape_in_when_there_is_something_to_scrape(helm: Path) -> None:
    def ports(*args: str) -> list[str]:
        policy = render(helm, "--set", "networkPolicy.enabled=true", *args)["NetworkPolicy"]
        return [port["port"] for port in policy["spec"]["ingress"][0]["ports"]]

    assert ports() == ["health"]
    assert ports("--set", "metrics.enabled=true") == ["health", "metrics"]


def test_a_monitor_of_an_operator_without_metrics_is_refused(helm: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.serviceMonitor\.enabled needs metrics\.enabled"):
        render(helm, "--set", "metrics.serviceMonitor.enabled=true")


@pytest.mark.parametrize(
    "value",
    [
        "metrics.port=8080",
        "metrics.podMonitor.interval=often",
        "imagee.tag=x",
        "image.pullPolicy=Sometimes",
        "replicas=2",
        "watchNamespaces=team-a",
        "watchNamespaces={Team}",
        "crds.install=1",
        "logFormat=xml",
        "image.digest=abc",
    ],
)
def test_a_mistaken_value_is_refused(helm: Path, value: str) -> None:
    with pytest.raises(ValueError, match="values don't meet the specifications of the schema"):
        render(helm, "--set", value)


def test_one_version_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert names.DEFAULT_IMAGE.endswith(f":{version}")


def test_the_table_of_rights_says_what_the_roles_say(helm: Path) -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)` \| ([a-z, ]+) \| .+ \|$", text, re.MULTILINE)
    rules = render(helm)["ClusterRole"]["rules"]
    assert dict(rows) == {resource: ", ".join(rule["verbs"]) for rule in rules for resource in rule["resources"]}
