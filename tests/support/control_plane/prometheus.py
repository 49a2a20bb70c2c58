"""A real Prometheus, configured from the chart's monitors as the Prometheus operator would do."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster import packages
from grpo_devcluster.progress import wait_until
from support.control_plane.chart import render
from support.trainer.launchers import free_ports

Vector = list[tuple[dict[str, str], float]]
"""Samples: labels and value."""

OPTIONS = ("serviceMonitor", "podMonitor", "prometheusRule", "grafanaDashboard")


def render_monitoring() -> dict[str, dict[str, Any]]:
    """Return the chart's objects by kind, with all monitoring switched on; the dashboard is the only ConfigMap."""
    values = ["metrics.enabled=true", *(f"metrics.{option}.enabled=true" for option in OPTIONS)]
    return render("--set", ",".join(values))


def write_rules(folder: Path, rendered: dict[str, dict[str, Any]]) -> Path:
    """Write the alert rules as a file that Prometheus reads."""
    (path := folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rendered["PrometheusRule"]["spec"]["groups"]}))
    return path


def promtool(*args: str) -> str:
    """Run promtool and return its output. Raises ValueError with the output if promtool fails."""
    packages.ensure(packages.METRICS)
    done = subprocess.run([str(packages.find("promtool")), *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stdout + done.stderr)
    return done.stdout


def scrape_config(job: str, endpoint: dict[str, Any], targets: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return a monitor's endpoint as a scrape configuration; `targets` are addresses with the labels from discovery."""

    def rules(key: str) -> list[dict[str, Any]]:
        words = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
        return [{words.get(name, name): value for name, value in rule.items()} for rule in endpoint.get(key, ())]

    return {
        "job_name": job,
        "scrape_interval": "500ms",
        "scrape_timeout": "500ms",
        "honor_labels": endpoint.get("honorLabels", False),
        "static_configs": [{"targets": [address], "labels": labels} for address, labels in targets.items()],
        "relabel_configs": rules("relabelings"),
        "metric_relabel_configs": rules("metricRelabelings"),
    }


class Prometheus:
    """A Prometheus server with its own folder, on a free port."""

    def __init__(self, folder: Path, scrape_configs: list[dict[str, Any]], rules: Path) -> None:
        packages.ensure(packages.METRICS)
        (port,) = free_ports(1)
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "prometheus.log"
        config = folder / "prometheus.yaml"
        everything = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(rules)]}
        config.write_text(yaml.safe_dump(everything | {"scrape_configs": scrape_configs}))
        options = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}")
        command = [str(packages.find("prometheus")), *options, f"--web.listen-address=127.0.0.1:{port}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def api(self, path: str, **query: str) -> Any:
        """Return the data of GET /api/v1/<path>. Raises ValueError if Prometheus refuses, OSError until it answers."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=5) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise ConnectionError("Prometheus is starting") from error
            raise ValueError(f"{path} {query}: {error.read().decode()}") from error

    def query(self, expression: str) -> Vector:
        """Return an instant vector."""
        found = self.api("query", query=expression)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in found]

    def wait_for(self, expression: str, until: Callable[[Vector], bool] = bool, timeout: float = 60) -> Vector:
        """Return an instant vector once `until` accepts it; by default, once it is not empty.

        Scrapes may be late or fail.
        """
        found: Vector = []

        def answered() -> bool:
            nonlocal found
            found = self.query(expression)
            return until(found)

        wait_until(answered, f"an answer to {expression}", timeout, interval=0.2)
        return found

    def wait_for_targets(self, count: int) -> None:
        """Wait until there are exactly `count` targets and all are up."""

        def are_up() -> bool:
            try:
                targets = self.api("targets")["activeTargets"]
            except OSError:  # Prometheus does not answer yet
                return False
            return len(targets) == count and all(target["health"] == "up" for target in targets)

        try:
            wait_until(are_up, f"{count} targets up", 60)
        except TimeoutError as error:
            errors = [(target["scrapeUrl"], target["lastError"]) for target in self.api("targets")["activeTargets"]]
            raise TimeoutError(f"{error}: {errors}") from None
