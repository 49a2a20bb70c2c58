"""A real Prometheus scrapes a real operator and real launchers: dashboard and alerts find their metrics."""

import json
import math
import re
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from grpo_devcluster.progress import wait_until
from support.control_plane.operators import Jobs, Operator, make_job
from support.control_plane.prometheus import Prometheus, promtool, render_monitoring, scrape_config, write_rules
from support.trainer.launchers import World

# A step every 0.2 s, reported by the real code. There is no GPU here: its figures are made up.
TRAINING = """
    from grpo_workload.training.step_metrics import summarise
    from grpo_workload.reporting.rank_metrics import DeviceUse, RankStep, summarise_ranks
    from grpo_workload.reporting.run_report import RankReport, RunReport
    from grpo_workload.rewards.table import RewardTable
    use = DeviceUse(gpu_utilization=75.0, memory_used_peak=2**36, memory_allocated_peak=2**34,
                    memory_reserved_peak=2**35)
    seconds = {"prompts": 0.01, "reward": 0.01, "journal": 0.01, "train": 0.05}
    ranks = [
        RankStep(rank=rank, seconds=seconds | {"generate": 0.1 + rank / 10}, generated_tokens=40, sample_tokens=60,
                 longest_sample_tokens=20, trained_tokens=50, fed_tokens=60, device=use)
        for rank in range(3)
    ]
    table = RewardTable(names=["accuracy"], values=[[1.0, 0.0, 1.0, 1.0]], totals=[1.0, 0.0, 1.0, 1.0],
                        overflows=[None] * 4)
    step_metrics = summarise(table, num_generations=2, scale_rewards="group", prompt_lengths=[5] * 4,
                             completion_lengths=[9, 10, 11, 10], truncated=[False] * 4, step_time=0.2)
    step_metrics |= {"loss": 0.1, "grad_norm": 0.5, "trained/entropy": 1.5} | summarise_ranks(ranks)
    run = STATE.parent / "run"
    report = RunReport(run, STATE, total_steps=10_000, step=0) if RANK == 0 else RankReport(STATE, RANK)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    step = 0
    while not asked:
        report.phase("Training")
        report.step(step, step_metrics, [], ranks)
        step += 1
        time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def rendered() -> dict[str, dict[str, Any]]:
    return render_monitoring()


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two pods of 2 + 1 ranks that train."""
    world = World(tmp_path_factory.mktemp("launchers"), [2, 1], TRAINING)
    world.start()
    yield world
    world.close()


@pytest.fixture(scope="module")
def own_jobs(operator: Operator, kubectl: Any) -> Iterator[Jobs]:
    operator.start()
    name = f"metrics-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield Jobs(kubectl, name)
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def prometheus(
    operator: Operator,
    own_jobs: Jobs,
    launchers: World,
    rendered: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    """Prometheus, scraping since before the first job; one job was restarted meanwhile, and one failed."""
    folder = tmp_path_factory.mktemp("prometheus")
    labels = {"namespace": "ns", "__meta_kubernetes_pod_label_training_grpo_dev_job": "job"}
    pods = {f"127.0.0.1:{pod.port}": labels | {"pod": pod.name} for pod in launchers.pods}
    service = {f"127.0.0.1:{operator.metrics_port}": {"namespace": "grpo-system", "service": "grpo-operator-metrics"}}
    scrape_configs = [
        scrape_config("grpo-operator", rendered["ServiceMonitor"]["spec"]["endpoints"][0], service),
        scrape_config("grpo-jobs", rendered["PodMonitor"]["spec"]["podMetricsEndpoints"][0], pods),
    ]
    server = Prometheus(folder, scrape_configs, write_rules(folder, rendered))
    try:
        server.wait_for_targets(3)
        own_jobs.apply(make_job("restarted", failurePolicy={"backoffSeconds": 0}))
        own_jobs.apply(make_job("failed", failurePolicy={"maxRestarts": 0}))
        for name in ("restarted", "failed"):
            own_jobs.wait_for(name, "Running", "True")
            own_jobs.fail(f"{name}-b-0")
        own_jobs.wait_for("failed", "Failed", "True")
        wait_until(lambda: own_jobs.status("restarted")["attempt"] == 1, "the second attempt", 80)
        yield server
    finally:
        server.close()


def _queries(rendered: dict[str, dict[str, Any]]) -> list[str]:
    """Return every query of the dashboard as Grafana asks it for all namespaces and jobs."""
    dashboard = json.loads(rendered["ConfigMap"]["data"]["grpo.json"])
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    asked += [re.sub(r"label_values\((.+), (\w+)\)", r"count by (\2) (\1)", query) for query in variables]
    words = {"$namespace": ".*", "$grpojob": ".*", "$__rate_interval": "1m"}
    for word, value in words.items():
        asked = [query.replace(word, value) for query in asked]
    assert not [query for query in asked if "$" in query]
    return asked


def test_every_query_of_the_dashboard_returns_data(prometheus: Prometheus, rendered: dict[str, dict[str, Any]]) -> None:
    waiting = set(_queries(rendered))
    assert len(waiting) > 35

    def all_answered() -> bool:
        for query in sorted(waiting):
            if any(not math.isnan(value) for _, value in prometheus.query(query)):
                waiting.discard(query)
        return not waiting

    try:
        wait_until(all_answered, "data for every query", 60, interval=0.5)
    except TimeoutError:
        pytest.fail("no data for:\n" + "\n".join(sorted(waiting)))


def test_every_metric_of_an_alert_exists_and_the_alert_of_a_failed_job_fires(
    prometheus: Prometheus, own_jobs: Jobs, rendered: dict[str, dict[str, Any]]
) -> None:
    rules = [rule for group in rendered["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    names = {name for rule in rules for name in re.findall(r"grpo_\w+", rule["expr"])}
    for name in sorted(names):
        prometheus.wait_for(f"count({name})")
    firing = f'ALERTS{{alertname="GRPOJobFailed",alertstate="firing",namespace="{own_jobs.namespace}"}}'
    prometheus.wait_for(firing)
    loaded = [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule["health"] for rule in loaded} == {rule["alert"]: "ok" for rule in rules}
    alerts = [alert for alert in prometheus.api("alerts")["alerts"] if alert["labels"]["alertname"] == "GRPOJobFailed"]
    assert f"GRPOJob {own_jobs.namespace}/failed has failed" in [alert["annotations"]["summary"] for alert in alerts]


def test_labels_of_jobs_and_pods_come_from_the_cluster_and_not_from_the_pods(
    prometheus: Prometheus, own_jobs: Jobs
) -> None:
    ((labels, _),) = prometheus.wait_for("grpo_step")
    assert labels.items() >= {"namespace": "ns", "grpojob": "job", "pod": "pod-0"}.items()
    assert not prometheus.query('{exported_namespace!=""}')

    found = prometheus.wait_for("grpo_rank_gpu_utilization_ratio", lambda vector: len(vector) == 3, timeout=120)
    use = sorted((labels["pod"], labels["rank"], value) for labels, value in found)
    assert use == [("pod-0", "0", 0.75), ("pod-0", "1", 0.75), ("pod-1", "2", 0.75)]
    restarts = prometheus.wait_for(f'grpo_operator_restarts_total{{namespace="{own_jobs.namespace}"}}')
    assert [(labels["reason"], value) for labels, value in restarts] == [("RankFailed", 1.0)]
    kinds = prometheus.wait_for(
        'count by (kind) (grpo_operator_api_requests_total{verb=~"create|apply|update",code=~"20."})'
    )
    written = {"GRPOJob", "Event", "Service", "NetworkPolicy", "ConfigMap", "StatefulSet"}
    assert {labels["kind"] for labels, _ in kinds} == written


def _jobs_by_phase(operator: Operator, namespace: str) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics", timeout=5) as response:
            text = response.read().decode()
    except OSError:  # the operator does not serve yet
        return {}
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = [(one.labels, one.value) for one in samples if one.name == "grpo_operator_jobs" and one.value]
    return {labels["phase"]: value for labels, value in found if labels["namespace"] == namespace}


def test_jobs_are_counted_right_after_a_restart_and_after_deletion(
    prometheus: Prometheus, operator: Operator, own_jobs: Jobs
) -> None:
    assert prometheus.wait_for(f'grpo_operator_jobs{{namespace="{own_jobs.namespace}",phase="Failed"}}')
    own_jobs.wait_for("restarted", "Running", "True")
    with operator.down():
        own_jobs("delete", "grpojob", "failed")
        own_jobs.apply(make_job("third", suspend=True))
    expected = {"Running": 1.0, "Suspended": 1.0}
    wait_until(lambda: _jobs_by_phase(operator, own_jobs.namespace) == expected, f"{expected} after a restart", 60)
    own_jobs("delete", "grpojob", "restarted", "third")
    wait_until(lambda: not _jobs_by_phase(operator, own_jobs.namespace), "no job counted after all were deleted", 60)


def test_a_port_that_is_taken_ends_the_operator_with_an_error(operator: Operator, tmp_path: Path) -> None:
    other = Operator(operator.kubeconfig, tmp_path / "operator.log", metrics_port=operator.metrics_port)
    operator.start()
    other.start()
    try:
        complaint = f"--metrics-port {operator.metrics_port}: "
        wait_until(lambda: complaint in other.log.read_text() and other.has_ended, "the end of the other operator", 60)
    finally:
        other.kill()


def test_rules_are_sound_and_alerts_fire_when_they_should(rendered: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    rules = write_rules(tmp_path, rendered)
    assert "SUCCESS" in promtool("check", "rules", str(rules))
    cases = Path(__file__).with_name("alerts.yaml").read_text().replace("RULES", str(rules))
    (tests := tmp_path / "tests.yaml").write_text(cases)
    assert "SUCCESS" in promtool("test", "rules", str(tests))
    alerts = [rule["alert"] for group in rendered["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    assert set(re.findall(r'alertname="(\w+)"', cases)) == set(alerts)
