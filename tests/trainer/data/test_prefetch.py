"""Prompts do not depend on the number of workers and are ready ahead of their step; errors name rows; no orphans."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_workload.data.prompt_maker import PreprocessError, PromptError
from support.paths import PROGRAMS
from support.trainer.agents import is_alive
from support.trainer.launchers import eventually


@pytest.fixture
def make_loader(tmp_path, monkeypatch):
    """Return user_rows.make_loader, which workers can import, too; loaders are closed when the test ends."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import user_rows

    loaders = []

    def make(function, rows, **settings):
        loaders.append(user_rows.make_loader(function, rows, tmp_path, **settings))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def test_prompts_depend_neither_on_the_number_of_workers_nor_on_the_step_that_a_run_resumes_from(make_loader):
    rows = [{"question": f"question {index}"} for index in range(7)]
    inline = make_loader("drawn", rows, num_workers=0)
    expected = [inline.take(step) for step in range(4)]
    texts = [prompt.text for prompts in expected for prompt in prompts]
    assert len(set(texts)) == len(texts), "a row drew the same random numbers in the second epoch as in the first"
    many = make_loader("drawn", rows, num_workers=3)
    assert [many.take(step) for step in range(4)] == expected
    # The second rank of a run that resumed from a checkpoint with another number of ranks.
    second_rank = make_loader("drawn", rows, num_workers=1, steps=range(2, 4), share=range(2, 3))
    assert [second_rank.take(step) for step in (2, 3)] == [prompts[2:] for prompts in expected[2:]]


def test_workers_are_ahead_by_exactly_prefetch_steps(make_loader, tmp_path):
    (tmp_path / "rows").mkdir()
    rows = [{"question": str(index), "folder": str(tmp_path / "rows")} for index in range(12)]
    loader = make_loader("noted", rows, num_workers=1, prefetch_steps=2)
    taken = {prompt.text for prompt in loader.take(0)}
    # Only the first step has been taken, and the next two are prepared.
    eventually(lambda: len(list((tmp_path / "rows").iterdir())) == 9, "three steps are prepared")
    assert taken < {path.name for path in (tmp_path / "rows").iterdir()}
    for step in (1, 2):
        loader.take(step)
    eventually(lambda: len(list((tmp_path / "rows").iterdir())) == 12, "the last step is prepared")
    loader.take(3)


FAULTS = [
    (
        "raises",
        PromptError,
        r"dataset\.preprocess: user_rows:faulty of row 1 raised KeyError: 'missing' \(.*user_rows\.py:\d+\)",
    ),
    ("no network", PreprocessError, r"user_rows:faulty of row 1 raised ConnectionError: no route to host"),
    ("no prompt", PromptError, r"of row 1 returned a row with answer; return a dict with `prompt`"),
    ("no row", PromptError, r"of row 1 returned a NoneType; return a dict"),
]
FAULTS_OF_WORKERS = [
    (
        "does not pickle",
        PromptError,
        r"row 1 has a column that does not pickle \(TypeError: .*generator.*drop it in dataset\.preprocess",
    ),
    (
        "is killed",
        PreprocessError,
        r"a worker process died before row \d was prepared.*raise resources\.limits\.memory",
    ),
]


@pytest.mark.parametrize(
    ("num_workers", "fault", "error", "message"),
    [(0, *fault) for fault in FAULTS] + [(1, *fault) for fault in FAULTS + FAULTS_OF_WORKERS],
)
def test_errors_name_the_row(make_loader, num_workers, fault, error, message):
    rows = [{"fault": ""}, {"fault": fault}, {"fault": ""}]
    loader = make_loader("faulty", rows, num_workers=num_workers)
    with pytest.raises(error, match=message):
        loader.take(0)


def children(folder):
    return [int(path.stem) for path in Path(folder).glob("*.pid")]


def test_workers_die_with_their_rank_whatever_they_are_doing(tmp_path):
    rank = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "user_rows.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        eventually(lambda: len(children(tmp_path)) == 2, "both workers prepare a row")
        assert all(is_alive(pid) for pid in children(tmp_path))
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    eventually(lambda: not any(is_alive(pid) for pid in children(tmp_path)), "the workers are gone")


def test_take_gives_up_on_a_row_that_hangs_and_a_closed_loader_leaves_no_process_and_no_file(make_loader, tmp_path):
    loader = make_loader("hangs", [{"folder": str(tmp_path)}] * 4, num_workers=1, timeout_seconds=5)
    with pytest.raises(
        PreprocessError, match=r"row \d was not prepared within 4 s; .*raise dataset\.dataloaderNumWorkers"
    ):
        loader.take(0)
    loader.close()
    eventually(lambda: not any(is_alive(pid) for pid in children(tmp_path)), "the worker is gone")
    assert not list(tmp_path.glob("*.pickle"))
