"""Shared by both sides of `trainer.py`: completion lengths set by the benchmark, and a clock around vLLM's `LLM`.

A step lasts from the start of one `LLM.generate` to the start of the next. All time outside `generate` is `rest`:
converting samples, rewards, log-probabilities, loss, backward pass, optimizer step, metrics, putting the engine to
sleep, waking it and pushing weights. `sleep` and `wake` are parts of `rest`: `sleep` is inside `LLM.sleep`, `wake`
from the first `LLM.wake_up` of a step to its `generate`.
Memory is what the driver counts on the device, over all processes, while the engine sleeps: from the end of
`LLM.sleep` to `LLM.wake_up`.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import memory_peak
from benchmarks.common.lengths import PROMPT_TOKENS
from benchmarks.common.runs import versions

LOOK_SECONDS = 0.02
GIB = 2**30


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that varies within each group, whatever was sampled."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def prompts() -> list[str]:
    """Texts whose number of bytes, and so of tokens, is that of a prompt."""
    return [f"{index:03d}".ljust(PROMPT_TOKENS, "x") for index in range(64)]


class Meter:
    """Replaces methods of `vllm.LLM`; after `steps` measured steps it calls `finish` with the results and exits.

    With `profile`, a file: one more step is profiled into it, and the memory at the peak of another one is listed.
    """

    def __init__(
        self,
        wanted: list[int],
        *,
        warmup: int,
        steps: int,
        finish: Callable[[dict[str, Any]], None],
        profile: Path | None,
    ) -> None:
        self._wanted, self._warmup, self._steps, self._finish, self._profile = wanted, warmup, steps, finish, profile
        self._starts: list[float] = []
        self._seconds: dict[str, list[float]] = defaultdict(list)  # by part of the step; one value per step
        self._tokens: list[int] = []
        self._memory = Memory()
        self._woken: float | None = None
        self._profiler: Any = None
        self._recorded = 0

    def install(self) -> None:
        """Replace the methods of `vllm.LLM`."""
        from vllm import LLM

        generate, sleep, wake_up, meter = LLM.generate, LLM.sleep, LLM.wake_up, self

        def metered_generate(llm: Any, requests: Any, sampling_params: Any = None, **options: Any) -> Any:
            params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(requests)
            if params[0].prompt_logprobs is not None:  # our check of the first push: not part of a step
                return generate(llm, requests, sampling_params, **options)
            expanded = meter.expanded(requests, params)
            meter.begin()
            outputs = generate(llm, *expanded, **options)
            meter.end(outputs)
            return meter.regrouped(outputs, [one.n for one in params])

        def metered_sleep(llm: Any, *args: Any, **options: Any) -> Any:
            start = now()
            result = sleep(llm, *args, **options)
            meter.fell_asleep(now() - start)
            return result

        def metered_wake_up(llm: Any, *args: Any, **options: Any) -> Any:
            meter.wakes_up()
            return wake_up(llm, *args, **options)

        LLM.generate, LLM.sleep, LLM.wake_up = metered_generate, metered_sleep, metered_wake_up

    @property
    def finished_steps(self) -> int:
        """Number of steps that have ended."""
        return max(0, len(self._starts) - 1)

    def expanded(self, requests: Sequence[Any], params: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """One request for each completion, with the length it should have."""
        many = [(request, one, index) for request, one in zip(requests, params, strict=True) for index in range(one.n)]
        assert len(many) == len(self._wanted), f"{len(many)} completions were asked for, not {len(self._wanted)}"
        sized = []
        for (_, one, index), length in zip(many, self._wanted, strict=True):
            own = one.clone()
            own.n, own.max_tokens, own.min_tokens, own.ignore_eos = 1, length, length, True
            own.seed = None if one.seed is None else one.seed + index  # as vLLM does for n > 1
            sized.append(own)
        return [request for request, *_ in many], sized

    def regrouped(self, outputs: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Put the outputs of single completions together under the original requests."""
        result, start = [], 0
        for size in sizes:
            first = outputs[start]
            first.outputs = [output.outputs[0] for output in outputs[start : start + size]]
            result.append(first)
            start += size
        return result

    def begin(self) -> None:
        """A generation, and so a step, begins."""
        self._starts.append(now())
        if self._woken is not None and len(self._starts) > 1:
            self._seconds["wake"].append(self._starts[-1] - self._woken)
        self._woken = None
        finished = len(self._starts) - self._warmup - self._steps - 1
        if finished == 0:
            self._finish(self._results())
        if finished == 1:
            self._write_profile()
        if finished == 2:
            assert self._profile is not None
            with self._profile.open("a") as file:
                file.write(f"\n{memory_peak.table(self._recorded)}\n")
        if finished == (0 if self._profile is None else 2):
            os._exit(0)

    def end(self, outputs: Sequence[Any]) -> None:
        """A generation has ended."""
        self._seconds["generation"].append(now() - self._starts[-1])
        made = [len(output.token_ids) for one in outputs for output in one.outputs]
        assert made == self._wanted, "completions have other lengths than were asked for"
        self._tokens.append(sum(made))
        further = len(self._starts) - self._warmup - self._steps
        if self._profile is not None and further == 2:
            self._recorded = memory_peak.start()
        if self._profile is not None and further == 1:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()

    def fell_asleep(self, seconds: float) -> None:
        """The engine has released its memory.

        TRL's engine also does this once before the first generation; that is not part of a step.
        """
        if self._starts:
            self._seconds["sleep"].append(seconds)
            self._memory.watch()

    def wakes_up(self) -> None:
        """The engine is about to take its memory back, or part of it."""
        self._memory.rest()
        if self._woken is None:
            self._woken = now()

    def _results(self) -> dict[str, Any]:
        measured = slice(self._warmup, self._warmup + self._steps)
        ends = self._starts[1:]
        seconds = {"step": [end - start for start, end in zip(self._starts, ends, strict=False)][measured]}
        seconds |= {name: values[measured] for name, values in self._seconds.items()}
        seconds["rest"] = [whole - part for whole, part in zip(seconds["step"], seconds["generation"], strict=True)]
        longest = max(self._wanted)
        return {
            "median": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
            "memory_gib": max(self._memory.used_gib[: measured.stop], default=None),
            "seconds": seconds,
            "completion_tokens": self._tokens[measured],
            "longest": longest,
            # Tokens of a batch padded to its longest sequence; all prompts have the same length.
            "padding": 1
            - sum(PROMPT_TOKENS + one for one in self._wanted) / (len(self._wanted) * (PROMPT_TOKENS + longest)),
            "memory_gib_by_step": self._memory.used_gib,
            "allocated_gib_by_step": self._memory.allocated_gib,
            "cached_gib_by_step": self._memory.cached_gib,
            "versions": versions("torch", "transformers", "accelerate", "deepspeed", "trl", "vllm"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }

    def _write_profile(self) -> None:
        self._profiler.__exit__(None, None, None)
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._profiler.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=90)
        rest = self._starts[-1] - self._starts[-2] - self._seconds["generation"][-1]
        assert self._profile is not None
        self._profile.write_text(f"{rest:.3f} s under the profiler\n{table}")


class Memory:
    """Peak memory in use on the device, and allocated by PyTorch, for each watched period."""

    def __init__(self) -> None:
        self.used_gib: list[float] = []
        self.allocated_gib: list[float] = []
        self.cached_gib: list[float] = []  # peak that PyTorch holds without a tensor in it
        self._is_watching = False
        self._lock = threading.Lock()
        if torch.cuda.is_available():
            threading.Thread(target=self._look, daemon=True).start()

    def watch(self) -> None:
        """Start a watched period."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            with self._lock:
                self.used_gib.append(0.0)
                self._is_watching = True

    def rest(self) -> None:
        """End the watched period, if there is one; later allocations do not count."""
        with self._lock:
            if self._is_watching:
                self._see()
                self.allocated_gib.append(round(torch.cuda.max_memory_allocated() / GIB, 2))
                self.cached_gib.append(
                    round((torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()) / GIB, 2)
                )
            self._is_watching = False

    def _look(self) -> None:
        while True:
            with self._lock:
                if self._is_watching:
                    self._see()
            time.sleep(LOOK_SECONDS)

    def _see(self) -> None:
        free, total = torch.cuda.mem_get_info()
        self.used_gib[-1] = max(self.used_gib[-1], round((total - free) / GIB, 2))


def now() -> float:
    """Time in seconds, once the device has finished all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
