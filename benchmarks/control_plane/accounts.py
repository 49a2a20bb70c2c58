"""Processor time by its users: tables of programs and of requests, from the raw lines of `scale.py`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.control_plane.figures import MANY, SIDES, Lines, Raw, median

PROGRAMS = {
    "kube-apiserver": "API server",
    "etcd": "etcd",
    "kube-controller-manager": "controller manager",
    "kube-scheduler": "scheduler",
    "kwok": "fake nodes",
    "controller": "own controller",
    "benchmark": "benchmark",
}
_PARTS = {
    "API server": ("kube-apiserver",),
    "rest of the control plane": ("etcd", "kube-controller-manager", "kube-scheduler", "kwok"),
    "operator, sending": ("benchmark",),  # which has the operator's client
    "operator, watching": ("controller",),
}
Table = tuple[list[str], list[list[str]]]
"""Head and rows."""


def programs(lines: Lines) -> Table:
    """Return the processor time of each program, a row for each side."""
    rows = []
    for side in lines.sides("jobs"):
        found = [line for line in lines.of("jobs", side) if line["cpu"].keys() >= PROGRAMS.keys()]
        if found:
            taken = [median(found, lambda line: float(line["cpu"][program])) for program in PROGRAMS]  # noqa: B023
            rows.append([SIDES[side], *(f"{value:.1f} s" for value in [*taken, sum(taken)])])
    return ["", *PROGRAMS.values(), "all"], rows


def requests(lines: Lines) -> Table:
    """Return what one request of each kind costs, and all of that kind for one job; the most expensive kind first."""
    head = ["", "a job", *_PARTS, "a job in all"]
    if not lines.sides("costs"):
        return head, []
    measured, jobs = lines.of("costs", "grpojob"), lines.of("jobs", "grpojob", jobs=MANY)
    rows = []
    for name in measured[0]["costs"]:
        parts = [_cost(measured, name, part) for part in _PARTS.values()]
        # The user creates the job, and the control plane the pods of a job.
        count = median(jobs, lambda line: line["requests"].get(name, line["jobs"]) / line["jobs"])  # noqa: B023
        rows.append((count * sum(parts), [name, f"{count:.1f}", *(f"{part:.1f} ms" for part in parts)]))
    return head, [[*cells, f"{whole:.0f} ms"] for whole, cells in sorted(rows, key=lambda row: -row[0])]


def _cost(lines: Sequence[Raw], name: str, part: tuple[str, ...]) -> float:
    return median(lines, lambda line: sum(line["costs"][name][program] for program in part))
