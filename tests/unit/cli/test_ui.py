"""`grpo ui` without a browser: what it reads from a run's folder, and which requests it answers."""

import json
import re
import shutil
import zlib
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from click.testing import CliRunner
from kubernetes import client

from grpo_cli.cluster.copying.folder import Folder
from grpo_cli.cluster.copying.remote_folder import ClaimError
from grpo_cli.cluster.kube import Kube
from grpo_cli.cluster.pod_http import PodError
from grpo_cli.commands import logs
from grpo_cli.errors import CliError
from grpo_cli.main import main
from grpo_cli.ui import finished, server
from grpo_cli.ui.finished import may_have_curves
from grpo_cli.ui.folder import FolderSource, run_folder
from grpo_cli.ui.history import MAX_COMPLETIONS, MAX_POINTS, History, decimated
from grpo_cli.ui.source import SourceError
from support.paths import RUN_FOLDER as RUN

STATIC = Path(server.__file__).parent / "static"


def _steps(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step, "reward": float(step)} for step in range(first, last)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of a run's files: the first 8 steps of examples/quickstart.yaml on CPUs."""
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def test_a_long_curve_is_averaged_to_a_bounded_number_of_points() -> None:
    rows, each = decimated(_steps(0, 4500), MAX_POINTS)
    assert (len(rows), each) == (900, 5)
    assert rows[0] == {"step": 4, "reward": 2.0}
    assert rows[-1]["step"] == 4499
    assert decimated(_steps(0, 10), 10) == (_steps(0, 10), 1)
    assert decimated([{"step": 0, "kl": None}, {"step": 1, "kl": 3.0}], 1)[0] == [{"step": 1, "kl": 3.0}]


def test_a_browser_gets_what_it_lacks() -> None:
    history = History()
    completions = [{"step": 4, "completion": "a"}]
    history.add({"metrics": _steps(0, 5), "completions": completions, "ranks": [{"step": 4, "ranks": []}]})
    assert [row["step"] for row in history.since(0, 2)["metrics"]] == [3, 4]
    assert history.since(0, 4)["metrics"] == []
    assert len(history.since(0, -1)["completions"]) == 1


def test_a_job_that_is_just_starting_has_no_files_that_a_pod_need_be_started_for() -> None:
    ran = "2026-01-01T00:00:00Z"
    for status, expected in (
        ({}, False),
        ({"phase": "Pending", "attempt": 0}, False),
        ({"phase": "Starting", "attempt": 0}, False),
        ({"phase": "Starting", "attempt": 1}, True),
        ({"phase": "Running", "attempt": 0, "runningTime": ran}, True),
        ({"phase": "Failed", "attempt": 0, "completionTime": ran}, True),
    ):
        assert may_have_curves({"status": status}) is expected, status


class Served(Folder):
    """A claim whose file an attempt makes shorter while it is read, or whose pod is gone."""

    error: Exception | None = None

    def read(self, path: str, offset: int, length: int) -> bytes:
        """See `Folder.read`."""
        if self.error is not None:
            raise self.error
        return super().read(path, offset, length)[:-1]


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (None, "became shorter while it was copied: the job goes on, try again"),
        (PodError("no answer for 120 s"), "claim data: no answer for 120 s"),
        (ClaimError("Input/output error"), "claim data: Input/output error"),
    ],
)
def test_files_that_cannot_be_fetched_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, complaint: str
) -> None:
    there = Served(str(tmp_path))
    there.error = error
    shutil.copytree(RUN, tmp_path / "sub/team/math/u")
    (here := tmp_path / "here").mkdir()
    monkeypatch.setattr(finished, "served", lambda *_, **__: nullcontext(there))
    metadata = {"namespace": "team", "name": "math", "uid": "u"}
    job = {"metadata": metadata, "spec": {"storage": {"claimName": "data", "subPath": "sub"}}}
    kube = Kube(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")), "team")
    with pytest.raises(CliError, match=complaint):
        finished.fetch(kube, job, here, lambda _: None)


@pytest.mark.parametrize(("has_logs", "tail"), [(True, None), (True, 1), (True, 0), (False, None)])
def test_logs_of_a_job_whose_pods_are_gone_are_those_that_its_claim_keeps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_logs: bool,
    tail: int | None,
) -> None:
    folder = Path(shutil.copytree(RUN, tmp_path / "team/math/u"))
    if has_logs:
        (folder / "logs").mkdir()
        (folder / "logs" / "math-node-0.log").write_text("attempt 0: boom\nno luck\n")
    monkeypatch.setattr(finished, "served", lambda *_, **__: nullcontext(Folder(str(tmp_path))))
    ended = {"phase": "Failed", "attempt": 0, "completionTime": "2026-01-01T00:00:00Z", "launcherPort": 1}
    ended["groups"] = [{"name": "node", "role": "trainer", "replicas": 1, "gpus": 1}]
    metadata = {"namespace": "team", "name": "math", "uid": "u"}
    job = {"metadata": metadata, "spec": {"storage": {"claimName": "data"}}, "status": ended}
    monkeypatch.setattr(logs, "is_away", lambda *_: True)
    kube = Kube(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")), "team")
    monkeypatch.setattr(Kube, "job", lambda *_: job)
    monkeypatch.setattr(Kube, "pods", lambda *_: [])
    with nullcontext() if has_logs else pytest.raises(CliError, match="has no pods; logs are deleted with their pods"):
        logs.print_logs(kube, "math", rank=None, role=None, tail=tail, previous=False)
    printed = ["math-node-0 | attempt 0: boom", "math-node-0 | no luck"][-2 if tail is None else 2 - tail :]
    assert capsys.readouterr().out.splitlines() == (printed if has_logs else [])


def test_answers_are_bounded() -> None:
    history = History()
    completions = [{"step": step, "completion": "x"} for step in range(5000)]
    history.add({"metrics": _steps(0, 50_000), "completions": completions})
    sent = history.since(0, -1)
    assert len(sent["metrics"]) <= MAX_POINTS
    assert [row["step"] for row in sent["completions"]] == list(range(5000 - MAX_COMPLETIONS, 5000))


def test_a_file_is_read_on_from_its_last_complete_line(run: Path) -> None:
    source = FolderSource(run)
    source.refresh()
    assert source.shown.history.last_step == 7
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "reward": 0.5}\n{"step": 9, "rew')
    source.refresh()
    assert source.shown.history.last_step == 8, "an incomplete line is not read"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ard": 1.0}\n')
    source.refresh()
    assert source.shown.history.metrics[-1] == {"step": 9, "reward": 1.0}
    assert len(source.shown.history.metrics) == 10


def test_a_run_that_continues_from_a_checkpoint_restarts_the_history(run: Path) -> None:
    source = FolderSource(run)
    source.refresh()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]))
    source.refresh()
    assert source.shown.history.generation == 1
    assert [row["step"] for row in source.shown.history.metrics] == [0, 1, 2, 3]
    assert source.shown.history.completions, "files that were not rewritten are read again, too"


def test_an_empty_folder_and_a_missing_folder_are_reported(tmp_path: Path) -> None:
    source = FolderSource(tmp_path)
    source.refresh()
    assert "no step has finished yet" in source.shown.note
    with pytest.raises(SourceError, match=r"folder .*missing does not exist: was it moved"):
        FolderSource(tmp_path / "missing").refresh()
    (tmp_path / "metrics.jsonl").write_text("{}}\n")
    with pytest.raises(SourceError, match="the run's files cannot be read"):
        source.refresh()


def test_the_newest_run_below_a_folder_is_shown(run: Path, tmp_path: Path) -> None:
    assert run_folder(run) == run
    assert run_folder(tmp_path) == run
    shutil.copytree(RUN, tmp_path / "later" / "run")
    (tmp_path / "later" / "run" / "metrics.jsonl").touch()
    assert run_folder(tmp_path) == tmp_path / "later" / "run"
    result = CliRunner().invoke(main, ["ui", "--folder", str(tmp_path / "missing")])
    assert (result.exit_code, "missing does not exist" in result.output) == (4, True)
    assert CliRunner().invoke(main, ["ui"]).exit_code == 2


@pytest.fixture
async def address(run: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(server, "SECONDS_BETWEEN", 0.0)
    async with server.serving(FolderSource(run), 0) as address:
        yield address


async def test_the_state_is_incremental_and_survives_an_error(address: str, run: Path) -> None:
    async with ClientSession() as session:

        async def state(query: str = "") -> Any:
            async with session.get(f"{address}api/state{query}") as answer:
                assert answer.status == 200
                return await answer.json()

        first = await state()
        assert [row["step"] for row in first["metrics"]] == list(range(8))
        assert first["ranks"]["step"] == 7
        assert first["completions"][0].keys() >= {"prompt", "completion", "reward", "advantage"}
        assert (await state("?generation=0&after=7"))["metrics"] == []
        shutil.rmtree(run)
        broken = await state()
        assert "does not exist" in broken["error"]
        assert len(broken["metrics"]) == 8
        assert broken["age"] is not None


async def test_ends_of_logs_that_a_folder_keeps_are_served(address: str, run: Path) -> None:
    (run / "logs").mkdir()
    (run / "logs" / "math-node-0.log").write_text("no luck\n")
    async with ClientSession() as session:
        async with session.get(f"{address}api/state") as answer:
            assert (await answer.json())["logs"] == {"math-node-0": zlib.crc32(b"no luck\n")}
        async with session.get(f"{address}api/logs") as answer:
            assert await answer.json() == {"math-node-0": "no luck\n"}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1]:80"])
async def test_other_names_for_loopback_are_refused(address: str, host: str) -> None:
    async with ClientSession() as session, session.get(f"{address}api/state", headers={"Host": host}) as answer:
        assert answer.status == 403
        assert "reward" not in await answer.text()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
async def test_only_get_is_answered(address: str, method: str) -> None:
    async with ClientSession() as session, session.request(method, f"{address}api/state") as answer:
        assert answer.status == 405


@pytest.mark.parametrize(
    ("path", "status"), [("", 200), ("app.js", 200), ("style.css", 200), ("nothing", 404), ("api/state?after=x", 400)]
)
async def test_every_answer_has_the_content_security_policy(address: str, path: str, status: int) -> None:
    async with ClientSession() as session, session.get(address + path) as answer:
        assert answer.status == status
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_server_is_on_loopback(address: str) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)


def test_the_page_loads_only_its_own_files_and_reads_no_text_as_html() -> None:
    assert {name for name, _ in server.ASSETS.values()} == {path.name for path in STATIC.iterdir()}
    for path in STATIC.iterdir():
        text = path.read_text()
        links = set(re.findall(r"https?://[^\"'\s)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert links == set(), path.name
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser| style=|"
        assert re.search(rf'{forbidden} on\w+="', text) is None, path.name


def test_the_stored_run_has_the_columns_that_the_trainer_writes() -> None:
    row = json.loads((RUN / "metrics.jsonl").read_text().splitlines()[0])
    assert {"reward", "trained/entropy", "time/generate", "padding_fraction", "ranks/slowest"} < row.keys()
