"""Free memory is what the pod's limit leaves, in control groups of both versions, or else what the node has."""

from pathlib import Path

import pytest

from grpo_workload.storage.free_memory import free_memory

LIMITED = 1_000_000 - (700_000 - 10_200)
FIRST = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")
SECOND = ("memory.max", "memory.current", "memory.stat")
ALL = "active_file 1\ninactive_file 1\ntotal_active_file 10000\ntotal_inactive_file 200\n"
OWN = "active_file 10000\ninactive_file 200\n"


@pytest.mark.parametrize(
    ("names", "limit", "stat", "free"),
    [
        (SECOND, "1000000", OWN, LIMITED),
        (FIRST, "1000000", ALL, LIMITED),
        ((), None, None, 4000 * 1024),
        (SECOND, "max", OWN, 4000 * 1024),
        (SECOND, "9223372036854771712", OWN, 4000 * 1024),
    ],
)
def test_a_limit_counts_without_cached_files_and_else_the_node(
    tmp_path: Path, names: tuple[str, ...], limit: str, stat: str, free: int
) -> None:
    (meminfo := tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "memory").mkdir()
    for name, text in zip(names, (limit, "700000", stat), strict=False):
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path, meminfo) == free


def test_this_machine() -> None:
    assert 0 < free_memory() < 2**50
