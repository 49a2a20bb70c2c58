"""Commands in the pages that are marked as tested, against a real API server, with what is shown of their output."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import PAGES, ROOT, blocks, commands
from operator_fixture import Operator

from grpo_devcluster import binaries

pytestmark = pytest.mark.api

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
    told = kubectl("explain", "grpojob.spec", "--recursive")
    assert "memoryLimit" in told
    assert "<no description>" not in told
    assert "Memory of the process" in kubectl("explain", "grpojob.spec.rewards.memoryLimit")
