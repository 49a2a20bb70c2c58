"""Completion lengths that a benchmark imposes, inside vLLM: each request ends after its number of tokens, not before.

`impose` is a plugin of vLLM, which loads it in every process that schedules requests: in servers, and in ranks with
Colocate. So lengths also hold for requests over HTTP, and for those that outlast a push of weights. All requests of a
prompt have lengths that depend on the prompt alone, and all steps have the same lengths. A completion that is
interrupted and continues as a request with a longer prompt keeps its length. vLLM imports this module, so it imports
no heavy package.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT

VARIABLE = "GRPO_BENCH_LENGTHS"


NUM_PROMPTS, NUM_GENERATIONS, PROMPT_TOKENS = 8, 8, 256  # of a step


@cache
def lengths(kind: str, scale: float = 1.0) -> list[int]:
    """New tokens of each completion of a step.

    All 512; or log-normal (mu 6.0, sigma 0.8, 64 to 2048) with a sum of 34,000, within 1%.
    """
    count = NUM_PROMPTS * NUM_GENERATIONS
    if kind == "equal":
        return [int(512 * scale)] * count
    assert kind == "lognormal", kind
    for seed in range(10_000):
        drawn = lognormal(count, seed)
        if abs(sum(drawn) - 34_000) < 340:
            return [max(2, int(one * scale)) for one in drawn]
    raise AssertionError("no draw of 34,000 tokens")


def lognormal(count: int, seed: int = 0) -> list[int]:
    """Completion lengths in tokens: log-normal with mu 6.0 and sigma 0.8, clipped to 64 to 2048."""
    drawn: list[int] = np.random.default_rng(seed).lognormal(6.0, 0.8, count).clip(64, 2048).astype(int).tolist()
    return drawn


def prompt(step: int, position: int) -> str:
    """Text whose number of bytes, and so of tokens, is that of a prompt; the last one says its position in the step."""
    return f"{step:04d}".ljust(PROMPT_TOKENS - 1, "x") + "abcdefgh"[position]


def write_prompts(file: Path, steps: int, make: Callable[[int, int], Any] = prompt) -> None:
    """Write a dataset of which each step takes prompts of all positions, although the trainer shuffles it.

    `make` returns the prompt of a step and a position.
    """
    from grpo_spec.training import TrainingConfig
    from grpo_workload.algorithm.samples import Prompt
    from grpo_workload.data.prompt_source import PromptSource

    prompts: list[Any] = [None] * steps * NUM_PROMPTS
    seed = TrainingConfig.model_fields["seed"].default
    source = PromptSource([{}] * len(prompts), lambda index, row: Prompt(index=index, text="", token_ids=()), seed=seed)
    for step in range(steps):
        for position in range(NUM_PROMPTS):
            prompts[source.draw(step, position, NUM_PROMPTS).index] = make(step, position)
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths of all completions of a job: the same in each step, for prompts made by `prompt`."""

    kind: str
    scale: float = 1.0

    def of(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the lengths of a prompt's completions, in tokens."""
        first = prompt_ids[-1] % NUM_PROMPTS * NUM_GENERATIONS
        return lengths(self.kind, self.scale)[first : first + NUM_GENERATIONS]

    def variables(self, folder: Path) -> dict[str, str]:
        """Return variables with which vLLM imposes these lengths; `folder` gets the plugin's entry point."""
        return entry_point(folder, "benchmarks.common.lengths:impose") | {VARIABLE: json.dumps(asdict(self))}


def entry_point(folder: Path, function: str) -> dict[str, str]:
    """Return variables with which vLLM calls `function` as a plugin; `folder` gets the entry point."""
    info = folder / "grpo_bench-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ngrpo_bench = {function}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH"), str(ROOT)]))}


class Imposer:
    """Gives requests their lengths, in the order in which an engine gets them."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        # By prompt: the newest request of each completion that was begun, by its place in the group; oldest first.
        self._begun: dict[tuple[int, ...], dict[int, Any]] = defaultdict(dict)

    def impose(self, request: Any) -> None:
        """Set the number of tokens after which a request of vLLM's scheduler ends, whatever it samples."""
        token_ids = list(request.prompt_token_ids or [])
        if len(token_ids) < PROMPT_TOKENS or request.max_tokens <= 1:  # not a prompt: a check of weights
            return
        prompt = tuple(token_ids[:PROMPT_TOKENS])
        place = self._place(request.request_id, token_ids, self._begun[prompt])
        self._begun[prompt].pop(place, None)
        self._begun[prompt][place] = request
        request.max_tokens = self._lengths.of(prompt)[place] - (len(token_ids) - len(prompt))
        request.sampling_params.max_tokens = request.max_tokens
        request.sampling_params._eos_token_id = None  # the property has no setter
        request.sampling_params.stop_token_ids = []

    def _place(self, request_id: str, token_ids: list[int], begun: dict[int, Any]) -> int:
        if len(token_ids) > PROMPT_TOKENS:
            for place, one in begun.items():
                if list(one.all_token_ids)[: len(token_ids)] == token_ids:
                    return place
            raise ValueError(f"request {request_id} continues a completion that this engine has not begun")
        if (number := re.match(r"(\d+)_", request_id)) is not None:  # vLLM's name for one of several samples
            return int(number[1])
        new = [place for place in range(NUM_GENERATIONS) if place not in begun]
        again = [place for place, one in begun.items() if len(one.all_token_ids) == PROMPT_TOKENS]
        return [*new, *again, 0][0]


def impose() -> None:
    """Let vLLM's scheduler impose the lengths of the environment; vLLM calls it as a plugin."""
    if VARIABLE not in os.environ:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    imposer = Imposer(Lengths(**json.loads(os.environ[VARIABLE])))
    add_request = Scheduler.add_request

    def add(scheduler: Any, request: Any) -> None:
        imposer.impose(request)
        add_request(scheduler, request)

    Scheduler.add_request = add
