"""The newest rows of a run's files, read from their ends and bounded, and GET /history of the launchers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.layout.contracts import make_contract
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.status_server import local_application
from grpo_workload.reporting import history
from grpo_workload.reporting.history import MAX_BYTES, MAX_ROWS, read_history
from grpo_workload.reporting.jsonl import StepLog
from support.control_plane.jobs import world


def write(run_dir: Path, name: str, steps: range, width: int = 10) -> None:
    log = StepLog(run_dir / f"{name}.jsonl")
    for step in steps:
        log.write(step, {"reward": step / 10, "text": "é" * width})
    log.close()


def test_rows_later_than_a_step_come_oldest_first(tmp_path: Path) -> None:
    write(tmp_path, "metrics", range(10))

    read = read_history(tmp_path, after=6)

    assert [row["step"] for row in read["metrics"]] == [7, 8, 9]
    assert read["metrics"][0]["reward"] == 0.7
    assert (read["ranks"], read["completions"]) == ([], [])


def test_a_long_run_gives_its_newest_rows_within_the_limits(tmp_path: Path) -> None:
    write(tmp_path, "metrics", range(MAX_ROWS + 50))
    write(tmp_path, "ranks", range(100), width=MAX_BYTES // 100)

    read = read_history(tmp_path)

    assert [row["step"] for row in read["metrics"]] == list(range(50, MAX_ROWS + 50))
    steps = [row["step"] for row in read["ranks"]]
    assert steps[-1] == 99
    assert 0 < len(steps) < 100
    assert len(json.dumps(read["ranks"], ensure_ascii=False).encode()) <= MAX_BYTES


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0}\n{"step": 1, "rew')

    assert read_history(tmp_path, files=["metrics"]) == {"metrics": [{"step": 0, "reward": 1.0}]}


@given(
    widths=st.lists(st.integers(0, 60), min_size=1, max_size=40), after=st.integers(-1, 40), limit=st.integers(1, 40)
)
def test_reading_from_the_end_gives_the_same_rows_as_reading_the_whole_file(
    widths: list[int], after: int, limit: int
) -> None:
    rows = [{"step": step, "text": "x" * width} for step, width in enumerate(widths)]
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as name:
        folder = Path(name)
        patch.setattr(history, "FIRST_BYTES", 64)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        read = read_history(folder, after=after, limit=limit, files=["metrics"])

    assert read["metrics"] == [row for row in rows if row["step"] > after][-limit:]


@asynccontextmanager
async def served(tmp_path: Path, pod: str) -> AsyncIterator[TestClient]:
    made, topology = world()
    contract = make_contract(made, topology, 3)
    here = {"state_dir": tmp_path / "state", "termination_log": tmp_path / "log", "data_dir": tmp_path}
    place = Place(contract=contract, pod=pod, pod_uid="u", **here)
    write(place.run_dir, "metrics", range(5))
    async with TestClient(TestServer(local_application(place))) as client:
        yield client


async def test_the_launcher_of_rank_0_serves_the_history_and_refuses_wrong_parameters(tmp_path: Path) -> None:
    async with served(tmp_path, "job-a-0") as client:
        answer = await client.get("/history?after=2&limit=1&of=metrics")
        body = await answer.json()
        wrong = [await (await client.get(f"/history?{query}")).text() for query in ("limit=0", "of=secrets", "after=x")]

    assert (body["attempt"], [row["step"] for row in body["metrics"]], body.keys()) == (3, [4], {"attempt", "metrics"})
    assert "limit is 0, but must be 1 to 2000" in wrong[0]
    assert "of: there is no file secrets; use metrics, ranks, completions" in wrong[1]
    assert "'x'" in wrong[2]


async def test_other_launchers_name_the_pod_with_the_history(tmp_path: Path) -> None:
    async with served(tmp_path, "job-b-0") as client:
        answer = await client.get("/history")
        text = await answer.text()

    assert answer.status == 404
    assert "job-a-0" in text
