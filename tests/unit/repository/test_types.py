"""Asserts that mypy refuses edits of a copy of the tree: fields and types that no status has, and times as texts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

DECIDE = Path("operator/grpo_operator/decide")

EDITS = {
    "attempts.py": ("attempt_start_time=draft.now", "attempt_start_tme=draft.now", 'argument "attempt_start_tme" for'),
    "placement.py": ("placement=None", "placement=0", '"placement" to "update" of "Draft" has incompatible type "int"'),
    "restarts.py": ("replacing=True", "replaced=True", 'Unexpected keyword argument "replaced" for overloaded fun'),
    "lifecycle.py": (
        "completion_time=draft.now",
        "completion_time=str(draft.now)",
        '"completion_time" to "update" of "Draft" has incompatible type "str"; expected "datetime | None"',
    ),
    "downloading.py": ("time=now", "time=str(now)", 'Argument "time" to "Failure" has incompatible type "str"'),
    "observe.py": (
        "known_time(ready.get(",
        "str(ready.get(",
        'return value type (got "str | datetime | None", expected',
    ),
}
"""For each file, what is edited, and what mypy says of it."""


def test_a_misspelt_field_of_a_status_one_of_another_type_and_a_time_as_a_text_are_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("spec", "operator"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, (right, wrong, _) in EDITS.items():
        path = tmp_path / DECIDE / file
        assert path.read_text().count(right) == 1
        path.write_text(path.read_text().replace(right, wrong))
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), *(str(DECIDE / f) for f in EDITS)]
    environ = os.environ | {"MYPYPATH": "", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    for file, (*_, message) in EDITS.items():
        assert re.search(rf"^{DECIDE / file}:\d+: error: .*{re.escape(message)}", done.stdout, re.MULTILINE), (
            done.stdout
        )
    lines = set(re.findall(r"^(\S+:\d+): error: ", done.stdout, re.MULTILINE))
    assert len(lines) == len(EDITS), done.stdout + done.stderr
