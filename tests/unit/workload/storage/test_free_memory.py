"""Free memory is what the pod's limit leaves, in control groups of both versions, or else what the node has."""

from pathlib import Path

import pytest

from grpo_workload.storage.free_memory import free_memory


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    (path := tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n")
    return path


def test_a_limit_counts_without_cached_files(tmp_path: Path, meminfo: Path) -> None:
    files = {
        "memory.max": "1000000",
        "memory.current": "700000",
        "memory.stat": "active_file 10000\ninactive_file 200\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path, meminfo) == 1_000_000 - (700_000 - 10_200)


def test_a_limit_of_version_1(tmp_path: Path, meminfo: Path) -> None:
    (tmp_path / "memory").mkdir()
    files = {
        "memory.limit_in_bytes": "1000000",
        "memory.usage_in_bytes": "700000",
        "memory.stat": "active_file 1\ninactive_file 1\ntotal_active_file 10000\ntotal_inactive_file 200\n",
    }
    for name, text in files.items():
        (tmp_path / "memory" / name).write_text(text)
    assert free_memory(tmp_path, meminfo) == 1_000_000 - (700_000 - 10_200)


@pytest.mark.parametrize("limit", [None, "max", "9223372036854771712"])
def test_without_a_limit_the_node_counts(tmp_path: Path, meminfo: Path, limit: str | None) -> None:
    if limit is not None:
        files = {"memory.max": limit, "memory.current": "700000", "memory.stat": "active_file 1\ninactive_file 1\n"}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
    assert free_memory(tmp_path, meminfo) == 4000 * 1024


def test_this_machine() -> None:
    assert 0 < free_memory() < 2**50
