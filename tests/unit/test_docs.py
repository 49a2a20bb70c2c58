"""Pages of docs/ say all that programs say."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric
from test_collector import place, rank_step
from test_instruments import watched

from grpo_operator.instruments import Instruments
from grpo_operator.names import Reason
from grpo_workload.collector import TrainingCollector
from grpo_workload.report import RunReport

DOCS = Path(__file__).parents[2] / "docs"


def test_every_reason_has_a_row() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "failures.md").read_text(), re.MULTILINE))
    assert {str(reason) for reason in Reason} - explained == set()
    workload = Path(__file__).parents[2] / "workload" / "grpo_workload"
    said = {
        word
        for file in ("launch", "engine_process", "run_once", "peers", "ranks")
        for word in re.findall(
            r'"((?:Peers?|Rank|Engine|Config|Stopped|Launcher|Contract)[A-Z]?[A-Za-z]*)"', (workload / f"{file}.py").read_text()
        )
    }
    assert {"PeerLost", "RankFailed"} <= said
    assert said - explained == set()


def _documented(heading: str) -> set[str]:
    """Names in the first column of the table below a heading."""
    section = (DOCS / "metrics.md").read_text().split(f"### {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
    columns = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    return {name for column in columns for name in re.findall(r"`(grpo_\w+)`", column)}


def _exported(registry: CollectorRegistry) -> set[str]:
    """Names of all families that have a sample, as a query has them: counters with _total, an info with _info."""
    ends = {"counter": "_total", "info": "_info"}
    families: list[Metric] = [family for family in registry.collect() if family.samples]
    return {family.name + ends.get(family.type, "") for family in families if family.name.startswith("grpo_")}


def test_every_metric_of_the_operator_has_a_row() -> None:
    instruments = Instruments()
    conditions = [{"type": "Failed", "status": "True"}]
    instruments.jobs.seen("key", watched("Failed", conditions=conditions, completionTime="2026-01-01T00:00:00Z"))
    instruments.restarted("ns", "Hung")
    instruments.requested("get", "Pod", 200)
    assert _exported(instruments.registry) == _documented("The operator")


def test_every_metric_of_a_launcher_has_a_row(tmp_path: Path) -> None:
    at = place(tmp_path, "job-a-0")
    report = RunReport(tmp_path / "run", at.state_dir, total_steps=2, step=0)
    report.phase("Training")
    report.step(0, {"reward": 1.0, "step_time": 1.0, "tokens_per_second": 1.0}, [], [rank_step(0)])
    report.saved(1, Path("step-1"))
    report.close()
    registry = CollectorRegistry()
    registry.register(TrainingCollector(at, is_ready=lambda: True, has_ended=lambda: False))
    assert _exported(registry) == _documented("The launchers")


@pytest.mark.parametrize("file", ["alerts.yaml", "dashboard.json"])
def test_dashboard_and_alerts_ask_for_documented_metrics(file: str) -> None:
    text = (DOCS.parent / "charts/grpo-operator/files" / file).read_text()
    asked = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\bgrpo_\w+", text)}
    assert asked
    assert asked <= _documented("The operator") | _documented("The launchers")
