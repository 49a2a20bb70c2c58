"""A rank that a server forks (support/trainer/rank_server.py) sees what a fresh process sees, and ends as one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.trainer.rank_server import RankServers

LOOK = """
import json, logging, os, resource, signal, sys, threading
seen = {
    "environ": dict(os.environ), "arguments": sys.argv, "folder": os.getcwd(), "path": sys.path[1:],
    "name": __name__, "flags": list(sys.flags), "files": sorted(os.listdir("/proc/self/fd")),
    "stdin": os.readlink("/proc/self/fd/0"), "stdout": os.readlink("/proc/self/fd/1"),
    "handlers": {number: str(signal.getsignal(number)) for number in range(1, 65)},
    "mask": os.umask(0), "group": os.getpgrp(), "session": os.getsid(0), "nice": os.nice(0),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
    "threads": os.listdir("/proc/self/task") == [str(os.getpid())], "logging": str(logging.root.handlers),
}
print(json.dumps(seen))
"""
END = """
import atexit, os, sys
atexit.register(print, "the interpreter has ended")
print("about to end")
if sys.argv[1] == "raises":
    raise ValueError("with a traceback")
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[RankServers]:
    made = RankServers()
    yield made
    made.close()


def environ(**others: str) -> dict[str, str]:
    # The server loads product code, of which a rank's environment has the path.
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | others


def said(servers: RankServers, folder: Path, command: list[str], variables: dict[str, str], *modules: str) -> str:
    """Return what a rank prints that a server with these modules forks."""
    with (folder / "log").open("w") as log:
        assert servers.start(modules, command, variables, log.fileno()).wait(60) == 0
    return (folder / "log").read_text()


def test_it_sees_what_a_fresh_process_sees(
    servers: RankServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "look.py").write_text(LOOK)
    for command in (["look.py", "a", "b"], ["-m", "look", "c"]):
        for rank in "01":  # the second one, too: the first leaves nothing behind
            variables = environ(RANK=rank)
            forked = json.loads(said(servers, tmp_path, command, variables))
            with (tmp_path / "log").open("w") as log:
                files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                subprocess.run([sys.executable, *command], env=variables, **files, check=True)
            assert forked == json.loads((tmp_path / "log").read_text())
            assert forked["environ"]["RANK"] == rank


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("0", 0, "about to end\nthe interpreter has ended\n"),
        ("3", 3, "about to end\nthe interpreter has ended\n"),
        ("raises", 1, "ValueError: with a traceback\n"),
        ("killed", -signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_a_fresh_process_ends(servers: RankServers, tmp_path: Path, how: str, code: int, said: str) -> None:
    (tmp_path / "end.py").write_text(END)
    with (tmp_path / "log").open("w") as log:
        rank = servers.start((), [str(tmp_path / "end.py"), how], environ(), log.fileno())
        assert rank.wait(60) == rank.poll() == code
    assert said in (tmp_path / "log").read_text()
    rank.kill()  # of a rank that has ended: nothing


def test_ranks_with_other_variables_get_a_server_of_their_own(servers: RankServers, tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text("import os; print(open(f'/proc/{os.getppid()}/environ').read().count('HF_HOME=/elsewhere'))")
    for variables, found in ((environ(), 0), (environ(HF_HOME="/elsewhere"), 1)):
        assert int(said(servers, tmp_path, [str(parent)], variables)) == found


def test_ranks_draw_different_numbers(servers: RankServers, tmp_path: Path) -> None:
    draw = tmp_path / "draw.py"
    draw.write_text("import random, sys; print(random.random(), sys.modules['numpy'].random.random())")
    drawn = [said(servers, tmp_path, [str(draw)], environ(), "numpy").split() for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 4
