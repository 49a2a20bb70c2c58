"""What both sides of `trainer.py` run under: lengths that the benchmark sets, and a clock around vLLM's `LLM`.

A step lasts from the start of one `LLM.generate` to the start of the next. What is not inside `generate` is `rest`: waking the engine up
and pushing weights to it, rewards, log-probabilities, loss, backward pass, optimizer step, sleep. Memory is what the driver counts on the
device, by whatever process, while the engine sleeps.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

NUM_PROMPTS, NUM_GENERATIONS, PROMPT_TOKENS = 8, 8, 256
LOOK_SECONDS = 0.01


def lengths(kind: str, scale: float = 1.0) -> list[int]:
    """New tokens of each completion of a step: all 512, or log-normal (mu 6.0, sigma 0.8, 64 to 2048) and 34,000 in all, within 1%."""
    count = NUM_PROMPTS * NUM_GENERATIONS
    if kind == "equal":
        return [int(512 * scale)] * count
    for seed in range(10_000):
        drawn = np.random.default_rng(seed).lognormal(6.0, 0.8, count).clip(64, 2048).astype(int)
        if abs(drawn.sum() - 34_000) < 340:
            return [max(2, int(one * scale)) for one in drawn]
    raise AssertionError("no draw of 34,000 tokens")


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Something that varies within each group, whatever was sampled."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def prompts() -> list[str]:
    """Texts of as many bytes, and so tokens, as a prompt has."""
    return [f"{index:03d}".ljust(PROMPT_TOKENS, "x") for index in range(64)]


class Meter:
    """Patched into `vllm.LLM`; ends the process after `steps` measured steps, when `finish` was given the results."""

    def __init__(
        self, wanted: list[int], *, warmup: int, steps: int, finish: Callable[[dict[str, Any]], None], profile: str | None
    ) -> None:
        self._wanted, self._warmup, self._steps, self._finish, self._profile = wanted, warmup, steps, finish, profile
        self._starts: list[float] = []
        self._generation: list[float] = []
        self._tokens: list[int] = []
        self._used: list[int] = []
        self._peaks: list[int] = []
        self._asleep = threading.Event()
        self._profiler: Any = None

    def install(self) -> None:
        """Take over `vllm.LLM`."""
        from vllm import LLM

        generate, sleep, wake_up, meter = LLM.generate, LLM.sleep, LLM.wake_up, self

        def metered_generate(llm: Any, requests: Any, sampling_params: Any = None, **options: Any) -> Any:
            params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(requests)
            meter.begin()
            outputs = generate(llm, *meter.expanded(requests, params), **options)
            meter.end(outputs)
            return meter.regrouped(outputs, [one.n for one in params])

        def metered_sleep(llm: Any, *args: Any, **options: Any) -> Any:
            result = sleep(llm, *args, **options)
            meter.fell_asleep()
            return result

        def metered_wake_up(llm: Any, *args: Any, **options: Any) -> Any:
            meter.wakes_up()
            return wake_up(llm, *args, **options)

        LLM.generate, LLM.sleep, LLM.wake_up = metered_generate, metered_sleep, metered_wake_up
        if torch.cuda.is_available():
            threading.Thread(target=self._watch, daemon=True).start()

    def expanded(self, requests: Sequence[Any], params: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """One request for each completion, of the length that it is to have."""
        many = [(request, one) for request, one in zip(requests, params, strict=True) for _ in range(one.n)]
        assert len(many) == len(self._wanted), f"{len(many)} completions were asked for, not {len(self._wanted)}"
        sized = []
        for (_, one), length in zip(many, self._wanted, strict=True):
            own = one.clone()
            own.n, own.max_tokens, own.min_tokens, own.ignore_eos = 1, length, length, True
            own.seed = None
            sized.append(own)
        return [request for request, _ in many], sized

    def regrouped(self, outputs: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Outputs of single completions as those of the requests that were made."""
        result, start = [], 0
        for size in sizes:
            first = outputs[start]
            first.outputs = [output.outputs[0] for output in outputs[start : start + size]]
            result.append(first)
            start += size
        return result

    def begin(self) -> None:
        """A generation begins, and so a step."""
        if self._profiler is not None:
            self._write_profile()
        self._starts.append(now())
        if len(self._starts) == self._warmup + self._steps + 1:
            self._finish(self._results())
            os._exit(0)

    def end(self, outputs: Sequence[Any]) -> None:
        """It has ended."""
        self._generation.append(now() - self._starts[-1])
        self._tokens.append(sum(len(output.token_ids) for one in outputs for output in one.outputs))
        if self._profile and len(self._generation) == self._warmup + self._steps:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()

    def fell_asleep(self) -> None:
        """The engine gave its memory back."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._used.append(0)
        self._asleep.set()

    def wakes_up(self) -> None:
        """It is about to take it again."""
        if self._asleep.is_set() and torch.cuda.is_available():
            self._peaks.append(torch.cuda.max_memory_allocated())
        self._asleep.clear()

    def _watch(self) -> None:
        while True:
            if self._asleep.wait() and self._used:
                free, total = torch.cuda.mem_get_info()
                self._used[-1] = max(self._used[-1], total - free)
            time.sleep(LOOK_SECONDS)

    def _results(self) -> dict[str, Any]:
        measured = slice(self._warmup, self._warmup + self._steps)
        seconds = [end - start for start, end in zip(self._starts, self._starts[1:], strict=False)][measured]
        generation = self._generation[measured]
        rest = [whole - part for whole, part in zip(seconds, generation, strict=True)]
        gib = [round(used / 2**30, 2) for used in self._used]
        return {
            "median": {name: statistics.median(values) for name, values in (("step", seconds), ("generation", generation), ("rest", rest))},
            "memory_gib": max(gib, default=None),
            "seconds": {"step": seconds, "generation": generation, "rest": rest},
            "tokens": self._tokens[measured],
            "memory_gib_by_sleep": gib,
            "allocated_gib_by_sleep": [round(peak / 2**30, 2) for peak in self._peaks],
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed", "trl")},
        }

    def _write_profile(self) -> None:
        self._profiler.__exit__(None, None, None)
        table = self._profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)
        with open(self._profile, "w") as file:
            file.write(table)
        self._profiler = None


def now() -> float:
    """Seconds, when the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
