"""Asserts that the import contracts of pyproject.toml bite: import-linter refuses each edit of a copy of the tree.

That it accepts the tree as it is, `make lint` shows.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGES = ("spec", "operator", "workload", "cli")

EDITS = {
    "what decides calls the cluster": (
        {"operator/grpo_operator/decide/plan.py": "from grpo_operator.runtime.cluster import Cluster"},
        ["rooms of the operator BROKEN", "what decides, lays out and describes calls nobody BROKEN"],
    ),
    "what lays out calls Kubernetes by itself": (
        {"operator/grpo_operator/layout/manifests.py": "import kubernetes"},
        ["what decides, lays out and describes calls nobody BROKEN"],
    ),
    "the operator imports the workload": (
        {"operator/grpo_operator/layout/topology.py": "from grpo_workload.algorithm.loss import grpo_loss"},
        ["the programs: the command line above the operator, and all above the spec BROKEN"],
    ),
    "a command for a cluster imports the workload": (
        {"cli/grpo_cli/commands/logs.py": "from grpo_workload.storage.journal import read_lineage"},
        ["of the command line, what runs a job on this machine alone knows the workload BROKEN"],
    ),
    "the spec loads torch": (
        {"spec/grpo_spec/trainer.py": "import torch"},
        ["the spec loads no torch and talks to nobody BROKEN"],
    ),
    "what a launcher reports progress with loads torch": (
        {"workload/grpo_workload/reporting/progress_files.py": "import torch"},
        ["launchers and the first process of engine pods load neither torch nor numpy BROKEN"],
    ),
    "a room imports one above it": (
        {"workload/grpo_workload/storage/journal.py": "from grpo_workload.training.rollout import Rollout"},
        ["rooms of the workload BROKEN"],
    ),
    "a room of the policy imports one above it": (
        {"workload/grpo_workload/policy/adapters/four_bit.py": "from grpo_workload.policy.step.policy import Policy"},
        ["rooms of the policy BROKEN"],
    ),
    "the workload knows the operator": (
        {"workload/grpo_workload/reporting/history.py": "from grpo_operator.api import names"},
        ["the programs: the command line above the operator, and all above the spec BROKEN"],
    ),
    "a module stands outside all rooms": (
        {"workload/grpo_workload/helpers.py": "import json"},
        ["rooms of the workload BROKEN"],
    ),
    "the operator imports a new room of the workload, which loads numpy": (
        {
            "workload/grpo_workload/figures/__init__.py": "from numpy import mean",
            "operator/grpo_operator/layout/topology.py": "from grpo_workload.figures import mean",
        },
        ["the programs: the command line above the operator, and all above the spec BROKEN"],
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what import-linter reads."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on a tree."""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES),
        "COLUMNS": "300",
    }
    command = [Path(sys.executable).with_name("lint-imports")]
    return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_that_breaks_a_contract_is_refused(tree: Path, what: str) -> None:
    edits, broken = EDITS[what]
    before = {tree / file: (tree / file).read_text() if (tree / file).exists() else None for file in edits}
    for path, line in zip(before, edits.values(), strict=True):
        path.parent.mkdir(exist_ok=True)
        text, future = before[path] or "", "from __future__ import annotations\n"
        path.write_text(text.replace(future, f"{future}\n{line}\n", 1) if future in text else f"{line}\n{text}")
    try:
        done = lint(tree)
    finally:
        for path, text in before.items():
            path.write_text(text) if text is not None else path.unlink()
    assert done.returncode != 0
    for sentence in broken:
        assert sentence in done.stdout, done.stdout + done.stderr
