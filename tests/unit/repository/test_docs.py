"""Pages have a row for each reason, phase, metric and room, and name no file, link or field that does not exist.

Their Python runs in test_docs_code.py, and their commands in tests/api/test_docs_commands.py.
"""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric

from grpo_operator.api.crd import crd
from grpo_operator.api.infrastructure import NetworkSpec
from grpo_operator.api.names import DEFAULTS_KINDS
from grpo_operator.api.site_objects import layer
from grpo_operator.api.spec import parse_spec
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.layout.fabric import fabric_environment
from grpo_operator.metrics.instruments import Instruments
from grpo_operator.metrics.jobs import PHASES, WatchedJob
from grpo_spec.reasons import OF_FAILURES, Reason
from grpo_workload.environments import sandbox
from grpo_workload.launcher.prometheus import TrainingCollector
from grpo_workload.reporting.progress_files import write_waiting
from grpo_workload.reporting.run_report import RunReport
from support.documents import PAGES, blocks
from support.paths import ROOT
from support.trainer.places import place, rank_step

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


def test_the_page_has_the_reasons_that_a_rule_can_name() -> None:
    section = (DOCS / "failures.md").read_text().partition("\n## Reasons of failures\n")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    of_containers_that_never_ran = {"ContainerCannotRun", "ContainerStatusUnknown", "StartError"}
    assert rows == set(OF_FAILURES) - of_containers_that_never_ran


def test_every_phase_is_drawn_and_has_a_row() -> None:
    page = (DOCS / "failures.md").read_text()
    (drawing,) = [block.text for block in blocks(DOCS / "failures.md") if block.language == "mermaid"]
    rows = page.split("| phase | holds while | next |")[1].split("\n\n")[0].splitlines()[2:]
    assert [phase for row in rows for phase in row.split("|")[1].strip().split(", ")] == list(PHASES)
    assert [phase for phase in PHASES if phase not in drawing] == []


def _documented(heading: str) -> set[str]:
    """Names in the first column of the table below a heading."""
    section = (DOCS / "metrics.md").read_text().split(f"### {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
    columns = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    return {name for column in columns for name in re.findall(r"`(grpo_\w+)`", column)}


def _exported(registry: CollectorRegistry) -> set[str]:
    """Names of all families with a sample, as queries use them: counters end in _total, an info in _info."""
    ends = {"counter": "_total", "info": "_info"}
    families: list[Metric] = [family for family in registry.collect() if family.samples]
    return {family.name + ends.get(family.type, "") for family in families if family.name.startswith("grpo_")}


def test_every_metric_of_the_operator_has_a_row() -> None:
    instruments = Instruments()
    instruments.leads()
    now = "2026-01-01T00:00:00Z"
    why = {"reason": "R", "message": "m", "observedGeneration": 1, "lastTransitionTime": now}
    status: dict[str, Any] = {"phase": "Failed", "completionTime": now, "usage": {"time": now}}
    status["conditions"] = [{"type": "Failed", "status": "True", **why}]
    status["lastFailure"] = {"reason": "Hung", "message": "m", "time": now}
    instruments.jobs.seen("key", WatchedJob.read("ns", "job", status))
    instruments.restarted("ns", "Hung")
    instruments.requested("get", "Pod", 200)
    instruments.listed("Pod", "start")
    instruments.mirror.heard("Pod")
    instruments.mirror.count = lambda: {"Pod": 1}
    assert _exported(instruments.registry) == _documented("The operator")


def test_every_metric_of_a_launcher_has_a_row(tmp_path: Path) -> None:
    at = place(tmp_path, "job-a-0")
    report = RunReport(tmp_path / "run", at.state_dir, total_steps=2, step=0)
    report.phase("Training")
    report.step(0, {"reward": 1.0, "step_time": 1.0, "tokens_per_second": 1.0}, [], [rank_step(0)])
    report.saved(1, Path("step-1"))
    write_waiting(at.state_dir, 0, 1)
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


def test_each_alert_links_to_its_lines_of_the_page_on_failures() -> None:
    alerts = yaml.safe_load((DOCS.parent / "charts/grpo-operator/files/alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules}
    assert links == {name: f"docs/failures.md#{name.lower()}" for name in links}
    assert {name.lower() for name in links} <= anchors(DOCS / "failures.md")


@cache
def files() -> list[str]:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def where(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fragments(language: str) -> list[Any]:
    return [
        pytest.param(block.text, id=f"{where(path)}:{block.line}")
        for path in PAGES
        for block in blocks(path)
        if block.language == language
    ]


def anchors(page: Path) -> set[str]:
    """The fragments by which GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=where)
def test_links_lead_somewhere(path: Path) -> None:
    """To a file, and to a heading of it."""
    for file, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
        if "://" not in file:
            page = path.parent / file if file else path
            assert page.exists(), file
            assert not anchor or anchor in anchors(page), anchor


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
        elif document.get("kind") in DEFAULTS_KINDS:
            layers = {document["kind"]: layer(document)}
            assert read_spec(MINIMAL, GRPOJobStatus(), layers).refused is None
        elif "kind" not in document:
            assert set(document) == {"spec"}, "a fragment shows where it stands"
            parse_spec(MINIMAL | document["spec"])


@pytest.mark.parametrize("page", [one for one in PAGES if one.name not in ("fields.md", "convert.md")], ids=where)
def test_cells_of_tables_fit_a_screen(page: Path) -> None:
    """On all pages but those with generated tables."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if max(len(cell.strip()) for cell in row.split("|")) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_tables_begin_with_a_head(page: Path) -> None:
    """A gap would split a table, and its second part be shown as text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [table for table in tables if not re.match(r".*\n\|[-| :]+\|\n", table)] == []


def named_fields(page: Path) -> Iterator[str]:
    """Yield what looks like a field's path. The first column of coming-from.md's tables has other tools' names."""
    for line in page.read_text().splitlines():
        ours = line.split("|", 2)[-1] if page.name == "coming-from.md" and line.startswith("|") else line
        yield from re.findall(
            r"`((?:[a-z][a-zA-Z]*(?:\[\])?)(?:\.(?!py`|sh`|md`)[a-z][a-zA-Z]*(?:\[\])?)+)(?:: \S+)?`", ours
        )


# test_convert.py checks convert.md, which is full of other tools' names.
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


ROOMS = {"grpo_workload": "the workload", "grpo_workload.policy": "the policy", "grpo_operator": "the operator"}
ROOMS |= {"grpo_cli": "the command line"}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_are_listed_as_the_layers_contract_has_them(package: str) -> None:
    """The tables of docs/architecture.md, from the top: the order in which rooms may import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [one["layers"] for one in contracts if one.get("containers") == [package]]
    section = (DOCS / "architecture.md").read_text().split(f"### Rooms of {ROOMS[package]}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert listed == [room.strip() for layer in layers for room in layer.split("|")]


def test_names_that_the_architecture_puts_into_a_file_are_in_it() -> None:
    """`name` in `path`, as in: `PATHS` in `operator/grpo_operator/api/names.py`."""
    text = (DOCS / "architecture.md").read_text()
    found = re.findall(r"`(\w+)`(?:,[^`]*)? in\s+`([\w/]+\.py)`", text)
    assert len(found) > 12
    assert [(name, path) for name, path in found if not re.search(rf"\b{name}\b", (ROOT / path).read_text())] == []


def test_every_promise_names_tests_that_are_there() -> None:
    rows = re.findall(r"^\| .+ \| `(\w+)` \| `(\S+)` \|$", (DOCS / "trust.md").read_text(), re.MULTILINE)
    assert len(rows) > 70
    texts = {path: (ROOT / "tests" / path).read_text() for _, path in rows}
    assert [name for name, path in rows if not re.search(rf"(def|class|^) ?{name}\b", texts[path], re.MULTILINE)] == []


def test_every_variable_of_every_fabric_is_listed() -> None:
    page = (DOCS / "gpus-and-networks.md").read_text()
    for fabric in ("Ethernet", "InfiniBand", "RoCE", "EFA"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{fabric}` |")]
        assert all(f"`{one['name']}={one['value']}`" in row for one in fabric_environment(NetworkSpec(fabric=fabric)))


def test_every_variable_that_a_reward_gets_is_listed() -> None:
    page = (DOCS / "rewards.md").read_text()
    (listed,) = re.findall(r"^Variables that each gets: (.*?)\.\n\n", page, re.MULTILINE | re.DOTALL)
    passed = sandbox.PASSED | {f"{prefix}*" for prefix in sandbox.PASSED_PREFIXES}
    assert set(re.findall(r"`([^`]+)`", listed)) == passed


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
