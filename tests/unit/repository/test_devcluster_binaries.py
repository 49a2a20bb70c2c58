"""The devcluster's binaries.

Asserted: what the cache key depends on; that one `go build` can make all programs; that the build needs no Python
package; and what a call says while another process builds.
"""

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from grpo_devcluster import binaries, paths
from grpo_devcluster.progress import wait_until


def test_cache_key_follows_module_files_and_sources_only(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("module a\n")
    before = binaries.cache_key(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert binaries.cache_key(tmp_path) == before
    (tmp_path / "go.sum").write_text("sum")
    assert binaries.cache_key(tmp_path) != before


def test_no_two_programs_are_built_under_one_name() -> None:
    files = [Path(package).name for name, package in binaries.PROGRAMS["all"].items() if name != "etcd"]
    assert len({*files, "server"}) == len(binaries.PROGRAMS["all"])


def test_a_cluster_of_real_nodes_needs_nothing_of_the_tests() -> None:
    assert set(binaries.PROGRAMS["all"]) - set(binaries.PROGRAMS["cluster"]) == {"kwok", "verdicts"}


def test_the_oldest_kubernetes_is_the_oldest_that_the_chart_allows() -> None:
    allowed = yaml.safe_load((paths.REPO / "charts/grpo-operator/Chart.yaml").read_text())["kubeVersion"]
    minor = binaries.OLDEST_KUBERNETES.rpartition(".")[0]
    assert allowed == f">={minor.removeprefix('v')}.0-0"
    assert f"k8s.io/kubernetes {binaries.OLDEST_KUBERNETES} " in (paths.OLDEST / "go.mod").read_text()


def test_the_build_needs_only_the_standard_library() -> None:
    load = f"import sys; sys.path.insert(0, {str(paths.REPO / 'devcluster')!r}); import grpo_devcluster.binaries"
    subprocess.run([sys.executable, "-I", "-S", "-c", load], check=True)


def test_a_call_that_waits_says_for_which_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path))
    folder = binaries.bin_dir()
    folder.mkdir(parents=True)
    said: list[str] = []

    def has_said(text: str) -> bool:
        said.append(capsys.readouterr().err)
        return text in "".join(said)

    waiting = threading.Thread(target=binaries.build, args=["cluster"])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        wait_until(lambda: has_said("waiting for kube-apiserver, 0 of 13 built"), "the first program", timeout=60)
        (folder / "kube-apiserver").touch()
        wait_until(lambda: has_said("waiting for etcd, 1 of 13 built"), "the second program", timeout=60)
        for name in binaries.PROGRAMS["cluster"]:
            (folder / name).touch()
    waiting.join(timeout=60)
    assert has_said(f"binaries are built: {folder}")
