"""The memory that a process may still take: what its pod's limit leaves, or the node. Torch-free."""

from __future__ import annotations

from pathlib import Path

_CGROUP, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")


def free_memory(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Return the bytes that processes of this container can still take before one of them is killed.

    Files that the kernel only caches do not count as taken. `cgroup` is the container's own control group, of version 2
    or 1; without a limit there, the node's memory counts alone.
    """
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    free = int(available.split()[1]) * 1024
    for folder, limit, usage, cached in (
        (cgroup, "memory.max", "memory.current", ("active_file", "inactive_file")),
        (
            cgroup / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_active_file", "total_inactive_file"),
        ),
    ):
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            taken = int((folder / usage).read_text()) - sum(int(stat[name]) for name in cached)
            free = min(free, int(most) - taken)
    return free
