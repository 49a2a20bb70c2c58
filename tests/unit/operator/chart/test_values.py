"""The chart's values reach their objects, are described with the same words everywhere, and wrong ones are refused."""

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from grpo_operator.api import names
from support.control_plane.chart import CHART, render
from support.paths import ROOT


def test_values_reach_the_pod() -> None:
    values = ["image.tag=v9", "image.pullSecrets[0].name=reg", "priorityClassName=high", "nodeSelector.disk=ssd"]
    values += ["podLabels.team=x", "tolerations[0].operator=Exists", "env[0].name=HTTPS_PROXY", "env[0].value=p"]
    values += ["logFormat=json", "logLevel=debug", "commonLabels.cost=ml", "podSecurityContext.runAsUser=null"]
    values += ["rbac.readNodes=false", "jobs.networkPolicy=false", "jobs.requests.cpuPerGpu=2", "jobs.requests.memory="]
    values += [f"jobs.allow{what}=true" for what in ("HostPath", "HostNetwork", "Privileged", "ServiceAccountToken")]
    objects = render(*(f"--set={value}" for value in values))
    assert all(o["metadata"]["labels"]["cost"] == "ml" for o in objects.values())
    template = objects["Deployment"]["spec"]["template"]
    pod = template["spec"]
    assert pod["containers"][0]["image"] == "ghcr.io/grpo-operator/operator:v9"
    assert pod["imagePullSecrets"] == [{"name": "reg"}]
    assert (pod["priorityClassName"], pod["nodeSelector"]) == ("high", {"disk": "ssd"})
    assert pod["tolerations"][2:] == [{"operator": "Exists"}]
    assert pod["containers"][0]["env"][1:] == [{"name": "HTTPS_PROXY", "value": "p"}]
    assert template["metadata"]["labels"].items() >= {"team": "x", "cost": "ml"}.items()
    allows = ["--allow-host-path", "--allow-host-network", "--allow-privileged", "--allow-service-account-token"]
    requests = [f"--request={one}" for one in ("cpu=100m", "cpuPerGpu=2", "memory=", "memoryPerGpu=4Gi")]
    flags = ["--no-nodes", "--no-network-policies", *allows]
    assert pod["containers"][0]["args"][3:] == ["--log-format=json", "--log-level=debug", *flags, *requests]
    assert not set(allows) & set(render()["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"])
    assert "runAsUser" not in pod["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True


def _described(schema: dict[str, Any], path: str = "") -> dict[str, str]:
    """Return the descriptions of the schema's values by path; a section without a description is entered."""
    found = {}
    for name, node in schema["properties"].items():
        if "description" in node:
            found[f"{path}{name}"] = node["description"]
        else:
            found |= _described(node, f"{path}{name}.")
    return found


def _commented(lines: list[str]) -> dict[str, str]:
    """Return the comments of values.yaml by the path of the value that follows them."""
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
    """Helm refuses values that the schema does not name; editors show the schema's descriptions."""
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


@pytest.mark.parametrize(
    "value",
    [
        "metrics.podMonitor.interval=often",
        "imagee.tag=x",
        "image.pullPolicy=Sometimes",
        "replicas=-1",
        "replica=1",
        "watchNamespaces=team-a",
        "watchNamespaces={Team}",
        "crds.install=1",
        "logFormat=xml",
        "jobs.requests.cpuPerGpu=0",
        "jobs.requests.memory=lots",
        "jobs.requests.gpu=1",
        "logLevel=trace",
        "image.digest=abc",
        "networkPolicy.apiServerCIDRs={kubernetes.default}",
    ],
)
def test_a_wrong_value_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="values don't meet the specifications of the schema"):
        render("--set", value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("metrics.port=8080", "metrics.port: 8080 serves the probes; choose another port"),
        ("metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.enabled needs metrics.enabled"),
    ],
)
def test_what_does_not_go_with_other_values_is_refused_by_name(value: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        render("--set", value)


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert names.DEFAULT_IMAGE.endswith(f":{version}")
