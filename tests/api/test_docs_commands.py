"""Commands that pages mark as tested run against a real API server and print the lines that the page shows.

`kubectl explain` has a description for every field.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_devcluster import binaries
from support.control_plane.operators import Operator
from support.documents import PAGES, blocks, commands
from support.paths import ROOT

TESTED = [
    pytest.param(command, shown, id=f"{page.name}:{block.line}:{number}")
    for page in PAGES
    for block in blocks(page)
    if block.is_tested
    for number, (command, shown) in enumerate(commands(block.text))
]


@pytest.fixture
def shell(operator: Operator, kubeconfig: Path) -> dict[str, str]:
    path = [str(binaries.bin_dir()), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {
        "KUBECONFIG": str(kubeconfig),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def test_pages_have_commands_that_are_tested() -> None:
    assert len(TESTED) > 8


@pytest.mark.parametrize(("command", "shown"), TESTED)
def test_a_command_does_what_its_page_shows(shell: dict[str, str], command: str, shown: list[str]) -> None:
    done = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=shell, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert [line for line in shown if line.strip() not in lines] == [], done.stdout


def test_every_field_is_explained(operator: Operator, kubectl: Callable[..., str]) -> None:
    explained = kubectl("explain", "grpojob.spec", "--recursive")
    assert "memoryLimit" in explained
    assert "<no description>" not in explained
    assert "Memory limit of the process" in kubectl("explain", "grpojob.spec.rewards.memoryLimit")
