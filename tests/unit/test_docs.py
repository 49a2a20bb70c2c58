"""Pages of docs/ say all that programs say, and name nothing that is not there. Their commands run in tests/api/test_docs_commands.py."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import PAGES, ROOT, blocks
from prometheus_client import CollectorRegistry, Metric
from test_collector import place, rank_step
from test_instruments import watched

from grpo_operator.api import NetworkSpec, parse_spec
from grpo_operator.crd import crd
from grpo_operator.fabric import fabric_environment
from grpo_operator.instruments import Instruments
from grpo_operator.names import Reason
from grpo_workload import sandbox
from grpo_workload.collector import TrainingCollector
from grpo_workload.report import RunReport

DOCS = ROOT / "docs"

MINIMAL = {
    "model": {"name": "m"},
    "dataset": {"name": "d"},
    "rewards": [{"name": "r", "accuracy": {}}],
    "trainer": {"groups": [{"name": "a", "gpus": 1}]},
}
SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


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


@cache
def files() -> list[str]:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def where(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fragments(language: str) -> list[Any]:
    return [
        pytest.param(block.text, id=f"{where(path)}:{block.line}") for path in PAGES for block in blocks(path) if block.language == language
    ]


@pytest.mark.parametrize("path", PAGES, ids=where)
def test_links_lead_somewhere(path: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=where)
def test_files_and_make_targets_that_are_named_are_there(path: Path) -> None:
    known = files()
    names = {Path(file).name for file in known}
    top = {file.split("/")[0] for file in known if "/" in file}
    text = path.read_text()
    for code in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w.-]+\.(py|sh)", code):
            assert code in names, code
        if re.fullmatch(r"[\w.-]+(/[\w.+-]+)+/?", code) and code.split("/")[0] in top:
            assert any((folder / code).exists() for folder in (ROOT, path.parent)), code
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^\s*(?:\$ )?|&& )make((?: [a-z]+)+)(?=`|$|\s+#| &&)", text, re.MULTILINE)
    assert {target for targets_named in named for target in targets_named.split()} <= targets


@pytest.mark.parametrize("text", fragments("yaml"))
def test_yaml_is_a_job_or_a_part_of_one(text: str) -> None:
    for document in yaml.safe_load_all(text):
        if document.get("kind") == "GRPOJob":
            parse_spec(document["spec"])
        elif "kind" not in document:
            assert set(document) == {"spec"}, "a fragment shows where it stands"
            parse_spec(MINIMAL | document["spec"])


@pytest.mark.parametrize("text", fragments("python"))
def test_python_parses(text: str) -> None:
    assert ast.parse(text).body


def named_fields(page: Path) -> Iterator[str]:
    """What looks like the path of a field; in tables of coming-from.md, the first column has others' names."""
    for line in page.read_text().splitlines():
        ours = line.split("|", 2)[-1] if page.name == "coming-from.md" and line.startswith("|") else line
        yield from re.findall(r"`((?:[a-z][a-zA-Z]*(?:\[\])?)(?:\.(?!py`|sh`|md`)[a-z][a-zA-Z]*(?:\[\])?)+)(?:: \S+)?`", ours)


# Those of convert.md, which is full of others' names, are held by test_convert.py.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "convert.md"], ids=where)
def test_fields_that_are_named_are_there(page: Path) -> None:
    for name in named_fields(page):
        parts = name.replace("[]", "").split(".")
        schema = SCHEMA["spec"] if parts[0] not in SCHEMA else SCHEMA[parts.pop(0)]
        if parts[0] not in schema["properties"]:
            continue  # a name of something else
        for part in parts:
            schema = schema.get("items", schema)
            if "properties" not in schema:  # as in a pod: the API server knows these
                break
            assert part in schema["properties"], name
            schema = schema["properties"][part]


def test_every_variable_of_every_fabric_is_told() -> None:
    page = (DOCS / "gpus-and-networks.md").read_text()
    for fabric in ("Ethernet", "InfiniBand", "RoCE", "EFA"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{fabric}` |")]
        assert all(f"`{one['name']}={one['value']}`" in row for one in fabric_environment(NetworkSpec(fabric=fabric)))


def test_every_variable_that_a_reward_gets_is_told() -> None:
    page = (DOCS / "rewards.md").read_text()
    (told,) = re.findall(r"^Variables that each gets: (.*?)\.\n\n", page, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", told)) == sandbox.PASSED | {f"{prefix}*" for prefix in sandbox.PASSED_PREFIXES}


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"]({page.name})" not in index] == []
