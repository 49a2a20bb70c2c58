"""Lengths that a benchmark imposes on any trainer's vLLM, and when each step's samples began and ended.

`impose` is a plugin of vLLM, which loads it in every process that schedules requests. Requests come in waves of one
step's completions: the n-th request of a wave gets the n-th length, and the wave's first request and last end are
written to a file, in seconds since the epoch. vLLM imports this module, so it imports no heavy package.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.common.lengths import PROMPT_TOKENS, entry_point

VARIABLE = "GRPO_BENCH_WAVES"


def variables(folder: Path, wanted: list[int], waves: Path, profiled: int | None = None) -> dict[str, str]:
    """Return variables with which vLLM imposes these lengths and writes `waves`; `folder` gets the entry point.

    `profiled`: number of a wave whose step is profiled; the line of the next wave's begin has what was seen.
    """
    given = json.dumps([str(waves), wanted, profiled])
    return entry_point(folder, "benchmarks.vs_field.clock:impose") | {VARIABLE: given}


class Waves:
    """Counts requests in waves. `write` gets one line at a wave's begin and one at its end."""

    def __init__(self, wanted: list[int], write: Any) -> None:
        self._wanted, self._write = wanted, write
        self._begun, self._sampled, self._running = 0, 0, set[str]()

    def begins(self, request_id: str) -> int:
        """Return the length of a request that begins, in tokens."""
        place = self._begun % len(self._wanted)
        if place == 0:
            self._write({"wave": self._begun // len(self._wanted), "begin": time.time()})
        self._begun += 1
        self._running.add(request_id)
        return self._wanted[place]

    def ends(self, request_id: str, sampled: int) -> None:
        """A request has ended with so many tokens; others than completions are ignored."""
        if request_id not in self._running:
            return
        self._running.remove(request_id)
        self._sampled += sampled
        if not self._running and self._begun % len(self._wanted) == 0:
            self._write({"wave": self._begun // len(self._wanted) - 1, "end": time.time(), "tokens": self._sampled})
            self._sampled = 0


def impose() -> None:
    """Let vLLM's scheduler impose lengths and write waves; vLLM calls it as a plugin."""
    if VARIABLE not in os.environ:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    file, wanted, profiled = json.loads(os.environ[VARIABLE])
    step: Any = None

    def write(line: dict[str, Any]) -> None:
        nonlocal step
        match line["wave"] - profiled if profiled is not None else None, "begin" in line:
            case -1, True:
                from benchmarks.vs_field.profile import Profiled

                step = Profiled()
            case 0, True:
                step.begin()
            case 0, False:
                step.sampled()
            case 1, True:
                line |= {"profile": step.end()}
        with Path(file).open("a") as out:
            out.write(json.dumps(line) + "\n")

    waves = Waves(wanted, write)
    add_request, free_request = Scheduler.add_request, Scheduler._free_request

    def add(scheduler: Any, request: Any) -> None:
        # Others are checks of weights, and tries of an engine's start.
        if len(request.prompt_token_ids or []) >= PROMPT_TOKENS and request.max_tokens > 1:
            params = request.sampling_params
            request.max_tokens = params.max_tokens = waves.begins(request.request_id)
            params._eos_token_id = None  # the property has no setter
            params.stop_token_ids = []
            params.stop = []
        add_request(scheduler, request)

    def free(scheduler: Any, request: Any, *args: Any, **options: Any) -> Any:
        waves.ends(request.request_id, request.num_output_tokens)
        return free_request(scheduler, request, *args, **options)

    Scheduler.add_request, Scheduler._free_request = add, free
