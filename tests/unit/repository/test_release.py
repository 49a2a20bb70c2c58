"""What the release workflow runs, as far as it goes without its registries, and the workflows themselves."""

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from grpo_devcluster import binaries
from support.paths import ROOT

ACTIONLINT = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.7"
NAMED = ("pyproject.toml", "charts/grpo-operator/Chart.yaml", "operator/grpo_operator/api/names.py")
NAMED += ("operator/Dockerfile", "workload/Dockerfile", "CHANGELOG.md")
"""Files that name the release."""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "scripts/release.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    """A copy of the files that name the release, whose changelog has its day."""
    for name in (*NAMED, "scripts/release.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("[0.1.0] - Unreleased", "[0.1.0] - 2027-01-31"))
    return tmp_path


def test_a_release_is_named_alike_everywhere(dated: Path) -> None:
    assert run(dated, "check", "0.1.0").returncode == 0


@pytest.mark.parametrize("name", NAMED)
def test_a_place_that_names_another_release_is_named(dated: Path, name: str) -> None:
    file = dated / name
    file.write_text(file.read_text().replace("0.1.0", "0.0.9"))
    said = run(dated, "check", "0.1.0")
    assert said.returncode == 1
    assert set(re.findall(r"release: (\S+) does not say 0\.1\.0", said.stderr)) == {name}


def test_what_is_published_beside_images_is_built(tmp_path: Path) -> None:
    tools = binaries.build("cluster")  # helm is one of them
    # Not validated here, which takes 20 s: `make dist` does.
    said = run(ROOT, "dist", str(tmp_path), "--no-validate", PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert said.returncode == 0, said.stderr
    sums = dict(line.split()[::-1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == set(said.stdout.split()) == {file.name for file in tmp_path.iterdir()} - {"SHA256SUMS"}
    assert all(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == sums[name] for name in sums)
    bills = {f"sbom-{lock}.cdx.json" for lock in ("operator", "cpu", "gpu")}
    chart = {"grpo-operator-0.1.0.tgz", "crds.yaml"}
    assert set(sums) == bills | chart | {"grpo_operator-0.1.0-py3-none-any.whl", "grpo_operator-0.1.0.tar.gz"}
    with zipfile.ZipFile(tmp_path / "grpo_operator-0.1.0-py3-none-any.whl") as wheel:
        packages = {name.split("/")[0] for name in wheel.namelist()}
    assert {"grpo_spec", "grpo_operator", "grpo_workload", "grpo_cli"} <= packages
    assert not packages & {"tests", "support", "benchmarks", "grpo_devcluster"}


def test_workflows_are_what_github_understands() -> None:
    workflows = sorted((ROOT / ".github/workflows").glob("*.yaml"))
    said = subprocess.run(["go", "run", ACTIONLINT, *workflows], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
