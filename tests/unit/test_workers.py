"""How pytest's workers divide the tests: were a folder's tests on two, there would be two clusters on one machine, and engines twice."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
MODULE = """
import pytest

@pytest.mark.parametrize("number", range(8))
def test_it(number):
    pass
"""


def test_a_folder_that_shares_something_stays_on_one_worker_and_what_takes_longest_begins(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for folder in ("api", "e2e", "trainer", "unit"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        for part in ("first", "second"):
            (tmp_path / "tests" / folder / f"test_{folder}_{part}.py").write_text(MODULE)
    shutil.copy(CONFTEST, tmp_path / "tests")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # this may be a worker itself
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "-v"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)

    ran = re.findall(r"^\[(gw\d)\].* PASSED tests/(\w+)/", done.stdout, re.MULTILINE)
    assert len(ran) == 64, done.stdout + done.stderr
    workers = {folder: {worker for worker, each in ran if each == folder} for _, folder in ran}
    assert [len(workers[folder]) for folder in ("e2e", "trainer", "api")] == [1, 1, 1]
    first = {worker: next(folder for each, folder in ran if each == worker) for worker in ("gw0", "gw1")}
    assert sorted(first.values()) == ["e2e", "trainer"]
