"""What holds the device's memory when most of it is held, by the lines of code that allocated it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

GIB = 2**30
_SKIPPED = ("/torch/", "<", "torch_dispatch", "contextlib")


def start() -> int:
    """Begin to record; returns the bytes that are allocated already, whose lines are not known."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    return torch.cuda.memory_allocated()


def table(before: int, rows: int = 25) -> str:
    """GiB that were there when recording began, and GiB by line of what came on top at the peak."""
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
            total -= held.pop(event["addr"], 0)  # 0: from before
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
    told = [f"{before / GIB:7.2f} GiB before, {peak / GIB:.2f} GiB more at the peak"]
    told += [f"{size / GIB:7.2f} {line}" for line, size in lines.most_common(rows)]
    return "\n".join(told)


def _line(frames: list[dict[str, object]]) -> str:
    told = [f"{str(f['filename']).rpartition('site-packages/')[2]}:{f['line']} {f['name']}" for f in frames]
    own = [line for frame, line in zip(frames, told, strict=True) if not any(word in str(frame["filename"]) for word in _SKIPPED)]
    return " < ".join((own or told)[:3])
