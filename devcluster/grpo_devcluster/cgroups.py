"""Cgroups of the nodes: each kubelet gets its own root, which also shows which processes run on that node."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PARENT = "grpo-devcluster"
# The cgroup v2 hierarchy of a hybrid host has no controllers: the kubelet ignores it, runc uses it.
_UNIFIED = "unified"
# The kernel weighs all pods together like one process of the machine: next to a few busy ones, pods would starve.
_WEIGHTS = {"cpu.shares": 4 * 1024, "cpu.weight": 4 * 100}


def cgroup_root(node: str) -> str:
    """Return the `cgroupRoot` of a node's kubelet."""
    return f"/{PARENT}/{node}"


def _is_v2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    if _is_v2():
        return [ROOT]
    return [d for d in sorted(ROOT.iterdir()) if d.is_dir() and not d.is_symlink()]


def create(node: str) -> None:
    """Create the node's root in every hierarchy; a cpuset is unusable until its cpus and mems are filled."""
    for hierarchy in _hierarchies():
        if hierarchy.name == _UNIFIED:
            continue
        parent = hierarchy
        for part in (PARENT, node):
            if _is_v2():
                controllers = (parent / "cgroup.controllers").read_text().split()
                (parent / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))
            child = parent / part
            child.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if not _is_v2() and (child / name).exists() and not (child / name).read_text().strip():
                    (child / name).write_text((parent / name).read_text())
            parent = child
        for name, weight in _WEIGHTS.items():
            if (file := hierarchy / PARENT / name).exists():
                file.write_text(str(weight))


def processes(node: str | None = None) -> list[int]:
    """Return the process ids in pods of one node, or of all nodes."""
    pids: set[int] = set()
    for hierarchy in _hierarchies():
        top = hierarchy / PARENT / node if node else hierarchy / PARENT
        for file in top.rglob("cgroup.procs"):
            pids.update(int(line) for line in file.read_text().split())
    return sorted(pids)


def remove() -> None:
    """Remove the empty tree, leaves first: cgroup folders cannot be removed in another order."""
    for hierarchy in _hierarchies():
        top = hierarchy / PARENT
        if not top.exists():
            continue
        folders = [top, *(d for d in top.rglob("*") if d.is_dir())]
        for folder in sorted(folders, key=lambda d: len(d.parts), reverse=True):
            folder.rmdir()
