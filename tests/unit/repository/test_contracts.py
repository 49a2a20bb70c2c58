"""Asserts that the import contracts of pyproject.toml bite: import-linter names each edit of a copy of the tree.

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
OPERATOR = "rooms of the operator"
NOBODY = "what decides, lays out and describes calls nobody"
PROGRAMS = "the programs: the command line above the operator, and all above the spec"
SPEC = "the spec loads no torch and talks to nobody"
LAUNCHERS = "launchers and the first process of engine pods load neither torch nor numpy"
COMMANDS = "of the command line, what runs a job on this machine alone knows the workload"
WORKLOAD, POLICY = "rooms of the workload", "rooms of the policy"

EDITS = [
    # module, what it imports, the contracts that refuse it
    ("operator/grpo_operator/decide/plan", "grpo_operator.runtime.cluster", (OPERATOR, NOBODY)),
    ("operator/grpo_operator/layout/manifests", "kubernetes", (NOBODY,)),
    ("operator/grpo_operator/layout/topology", "grpo_workload.algorithm.loss", (PROGRAMS,)),
    ("operator/grpo_operator/layout/contracts", "grpo_workload.figures", (PROGRAMS,)),  # a new room, which loads numpy
    ("cli/grpo_cli/commands/logs", "grpo_workload.storage.journal", (COMMANDS,)),
    ("spec/grpo_spec/trainer", "torch", (SPEC,)),
    ("workload/grpo_workload/reporting/progress_files", "torch", (LAUNCHERS,)),
    ("workload/grpo_workload/storage/journal", "grpo_workload.training.rollout", (WORKLOAD,)),
    ("workload/grpo_workload/policy/adapters/four_bit", "grpo_workload.policy.step.policy", (POLICY,)),
    ("workload/grpo_workload/reporting/history", "grpo_operator.api.names", (PROGRAMS,)),
]
OUTSIDE = {"figures/__init__": "numpy", "helpers": "json"}
"""New modules of the workload, which are in no room."""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For each broken contract, what import-linter says of it after all these edits."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", tree)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for module, imported in OUTSIDE.items():
        path = tree / f"workload/grpo_workload/{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import {imported}\n")
    for module, imported, _ in EDITS:
        path = tree / f"{module}.py"
        path.write_text(f"{path.read_text()}\nimport {imported}\n")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES)}
    command = [Path(sys.executable).with_name("lint-imports")]
    done = subprocess.run(
        command, cwd=tree, env=environ | {"COLUMNS": "300"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    sections = done.stdout.partition("Broken contracts")[2].split("\n----")
    names = [section.rstrip().rpartition("\n")[2] for section in sections]
    return dict(zip(names, sections[1:], strict=False))


@pytest.mark.parametrize(("module", "imported", "contracts"), EDITS, ids=lambda value: str(value).replace("/", "."))
def test_an_import_that_breaks_a_contract_is_named(
    refusals: dict[str, str], module: str, imported: str, contracts: tuple[str, ...]
) -> None:
    line = f"{module.partition('/')[2].replace('/', '.')} -> {imported}"
    assert [name for name in contracts if line not in refusals.get(name, "")] == [], refusals


@pytest.mark.parametrize("module", OUTSIDE)
def test_a_module_outside_all_rooms_is_named(refusals: dict[str, str], module: str) -> None:
    assert module.partition("/")[0] in refusals[WORKLOAD]
