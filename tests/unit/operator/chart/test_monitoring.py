"""The chart's monitoring objects find the operator and the launchers."""

import re

from grpo_operator.api import names
from support.control_plane.chart import render
from support.control_plane.jobs import job, pod_templates

PARTS = ("serviceMonitor", "podMonitor", "prometheusRule", "grafanaDashboard")


def _monitoring(*values: str) -> list[str]:
    everything = ("metrics.enabled=true", *(f"metrics.{part}.enabled=true" for part in PARTS))
    return [f"--set={value}" for value in (*everything, *values)]


def test_monitoring_is_off_by_default_and_can_all_be_switched_on() -> None:
    kinds = {"Service", "ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}
    assert not kinds & render().keys()
    objects = render(*_monitoring("metrics.port=9100", "metrics.podMonitor.labels.release=prometheus"))
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


def test_the_pod_monitor_matches_the_labels_and_the_port_of_launchers() -> None:
    monitor = render(*_monitoring())["PodMonitor"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    for template in pod_templates(job()).values():
        assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert endpoint["port"] in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    label = endpoint["relabelings"][0]["sourceLabels"][0].removeprefix("__meta_kubernetes_pod_label_")
    assert label == re.sub(r"\W", "_", names.LABEL_JOB)
    assert monitor["namespaceSelector"] == {"any": True}
    chosen = render(*_monitoring("watchNamespaces={a,b}"))["PodMonitor"]["spec"]["namespaceSelector"]
    assert chosen == {"matchNames": ["a", "b"]}


def test_the_network_policy_allows_scrapes_if_metrics_are_enabled() -> None:
    def ports(*args: str) -> list[str]:
        policy = render("--set", "networkPolicy.enabled=true", *args)["NetworkPolicy"]
        return [port["port"] for port in policy["spec"]["ingress"][0]["ports"]]

    assert ports() == ["health"]
    assert ports("--set", "metrics.enabled=true") == ["health", "metrics"]


def test_alerts_link_to_the_pages_that_the_values_name() -> None:
    def links(*values: str) -> set[str]:
        groups = render(*_monitoring(*values))["PrometheusRule"]["spec"]["groups"]
        return {rule["annotations"]["runbook_url"].partition("#")[0] for group in groups for rule in group["rules"]}

    assert links() == {"docs/failures.md"}
    pages = "https://git.example.com/grpo/blob/v0.1.0/"
    assert links(f"metrics.prometheusRule.runbooks={pages}") == {f"{pages}docs/failures.md"}
