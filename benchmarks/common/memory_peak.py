"""Lines of code that hold the device's memory at its peak."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

GIB = 2**30
_SKIPPED = ("/torch/", "<", "torch_dispatch", "contextlib")


def start() -> int:
    """Start recording allocations; return the bytes allocated so far, whose lines are unknown."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    return torch.cuda.memory_allocated()


def table(before: int, rows: int = 25) -> str:
    """Return a table: GiB held before recording began, and GiB by line of code allocated on top of it at the peak."""
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    held: dict[int, int] = {}
    total, peak, moment = 0, 0, 0
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            held[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= held.pop(event["addr"], 0)  # 0: allocated before recording
        if total > peak:
            peak, moment = total, index
    alive: dict[int, dict[str, Any]] = {}
    for event in trace[: moment + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    lines: Counter[str] = Counter()
    for event in alive.values():
        lines[_line(event["frames"])] += event["size"]
    shown = [f"{before / GIB:7.2f} GiB before, {peak / GIB:.2f} GiB more at the peak"]
    shown += [f"{size / GIB:7.2f} {line}" for line, size in lines.most_common(rows)]
    return "\n".join(shown)


def _line(frames: list[dict[str, object]]) -> str:
    shown = [f"{str(f['filename']).rpartition('site-packages/')[2]}:{f['line']} {f['name']}" for f in frames]
    own = [
        line
        for frame, line in zip(frames, shown, strict=True)
        if not any(word in str(frame["filename"]) for word in _SKIPPED)
    ]
    return " < ".join((own or shown)[:3])
