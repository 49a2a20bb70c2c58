"""A plugin of vLLM for one rank with Colocate: imposes lengths by a schedule, and notes what happens to its KV cache.

Each line that it appends to a file is an event: "cache" (tokens that it holds), "preempted" (a sequence lost its
place), and "asleep" (bytes that the driver counts beside torch, after the engine has gone to sleep). vLLM imports this
module, so it imports no heavy package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.lengths import PROMPT_TOKENS, entry_point

VARIABLE = "GRPO_BENCH_CACHE"


def variables(folder: Path, schedule: Sequence[tuple[int, int]]) -> dict[str, str]:
    """Return variables with which vLLM loads the plugin.

    Args:
        folder: gets the entry point, and the file of events.
        schedule: numbers of completions and their tokens, in order; the last tokens hold for all others, too.
    """
    wanted = json.dumps({"schedule": schedule, "file": str(folder / "events.jsonl")})
    return entry_point(folder, "benchmarks.common.cache_watch:watch") | {VARIABLE: wanted}


def events(folder: Path) -> list[tuple[str, int]]:
    """Return what happened so far: names and values."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [(name, value) for name, value in map(json.loads, lines)]


def scheduled(schedule: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the tokens of each completion."""
    for count, tokens in schedule:
        for _ in range(count):
            yield tokens
    while True:
        yield schedule[-1][1]


def impose(request: Any, lengths: Iterator[int]) -> None:
    """Set the number of tokens after which a request of vLLM's scheduler ends, whatever it samples."""
    if len(request.prompt_token_ids or []) < PROMPT_TOKENS or request.max_tokens <= 1:  # a check of weights
        return
    request.max_tokens = request.sampling_params.max_tokens = next(lengths)
    request.sampling_params._eos_token_id = None  # the property has no setter
    request.sampling_params.stop_token_ids = []


def watch() -> None:
    """Wrap vLLM's scheduler and its `sleep`; vLLM calls it as a plugin."""
    if VARIABLE not in os.environ:
        return
    import torch
    from vllm import LLM
    from vllm.v1.core.sched.scheduler import Scheduler

    wanted = json.loads(os.environ[VARIABLE])
    lengths = scheduled(wanted["schedule"])
    begin, add, preempt, sleep = Scheduler.__init__, Scheduler.add_request, Scheduler._preempt_request, LLM.sleep

    def note(name: str, value: int) -> None:
        with Path(wanted["file"]).open("a") as file:
            file.write(json.dumps([name, value]) + "\n")

    def begun(scheduler: Any, *args: Any, **named: Any) -> None:
        begin(scheduler, *args, **named)
        cache = scheduler.vllm_config.cache_config
        note("cache", cache.num_gpu_blocks * cache.block_size)

    def added(scheduler: Any, request: Any) -> None:
        impose(request, lengths)
        add(scheduler, request)

    def preempted(scheduler: Any, *args: Any, **named: Any) -> None:
        note("preempted", 1)
        preempt(scheduler, *args, **named)

    def slept(engine: Any, *args: Any, **named: Any) -> Any:
        result = sleep(engine, *args, **named)
        free, total = torch.cuda.mem_get_info()
        note("asleep", total - free - torch.cuda.memory_reserved())
        return result

    Scheduler.__init__, Scheduler.add_request, Scheduler._preempt_request = begun, added, preempted
    LLM.sleep = slept
