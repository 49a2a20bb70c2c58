"""Kernels of the GPU during one step of a trainer, by kind, and for how long none ran.

`Profiled` belongs to the process that schedules a trainer's samples. With colocated vLLM that is the trainer's own, so
the step is seen whole. The profiler slows a step down, above all between kernels: its seconds are no measure of it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

KINDS = {
    "copies": r"^Memcpy|^Memset",
    "attention": r"flash|fmha|attention|attn|reshape_and_cache|merge_state",
    "products": r"nvjet|gemm|gemv|cutlass|xmma|splitK",  # of matrices
    "logits and tokens": r"topk|top_k|sampl|gumbel|logprob|log_softmax|softmax|argmax|cross_entropy|penalt|temperature",
    "optimizer": r"adam|multi_tensor",
}
OTHER = "other kernels"  # norms, activations, rotary embeddings, additions
TOP = 40


class Profiled:
    """One step, from `begin` to `end`; `sampled` is called when its samples are complete."""

    def __init__(self) -> None:
        """Load the profiler, which takes seconds, before the step begins."""
        import torch

        known = torch.profiler.ProfilerActivity
        self._profiler: Any = torch.profiler.profile(
            activities=[known.CUDA if torch.cuda.is_available() else known.CPU]
        )
        self._profiler.prepare_trace()
        self._times = list[int]()  # nanoseconds since 1970, as those of kernels

    def begin(self) -> None:
        """The step begins."""
        self._profiler.start_trace()
        self._times.append(time.time_ns())

    def sampled(self) -> None:
        """All samples are there."""
        self._times.append(time.time_ns())

    def end(self) -> dict[str, Any]:
        """Return what was seen while samples were drawn, and in the rest of the step."""
        begin, sampled, end = *self._times, time.time_ns()
        self._profiler.stop_trace()
        events = [
            (one.start_ns(), one.duration_ns(), one.name())
            for one in self._profiler.profiler.kineto_results.events()
            if one.device_type().name == "CUDA"
        ]
        return {"sampling": kernels(events, begin, sampled), "rest": kernels(events, sampled, end)}


def kernels(events: Iterable[tuple[int, int, str]], begin: int, end: int) -> dict[str, Any]:
    """Return the seconds of a window, those in which at least one kernel ran, and those of each kind of kernel.

    Args:
        events: begin and duration in nanoseconds, and name. One belongs to the window in which it begins.
        begin: of the window, as the events'.
        end: of the window.
    """
    kinds, names, number = Counter[str](), Counter[str](), 0
    busy, until = 0, begin
    for at, duration, name in sorted(one for one in events if begin <= one[0] < end):
        number += 1
        kinds[kind_of(name)] += duration
        names[name[:80]] += duration
        busy += max(0, at + duration - max(at, until))
        until = max(until, at + duration)
    return {
        "seconds": round((end - begin) / 1e9, 3),
        "gpu_seconds": round(busy / 1e9, 3),
        "kernels": number,
        "kinds": {kind: round(value / 1e9, 3) for kind, value in kinds.most_common()},
        "longest": {name: round(value / 1e9, 3) for name, value in names.most_common(TOP)},
    }


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def as_table(lines: Iterable[dict[str, Any]]) -> str:
    """A Markdown table of the profiles in result lines."""
    kinds = [*KINDS, OTHER]
    table = [f"| side | part | seconds | GPU busy | {' | '.join(kinds)} |", "|" + " --- |" * (4 + len(kinds))]
    for line in lines:
        for part, seen in line.get("profile", {}).items():
            cells = [seen["seconds"], seen["gpu_seconds"], *(seen["kinds"].get(kind, 0.0) for kind in kinds)]
            table.append(f"| {line['side']} | {part} | {' | '.join(f'{one:.2f}' for one in cells)} |")
    return "\n".join(table)
