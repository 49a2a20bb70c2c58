"""Turns of agents that a benchmark imposes, inside vLLM: what each turn says, call or answer, was recorded before.

`impose` is a plugin of vLLM, as that of `benchmarks.common.lengths`. Each step of the engine samples as ever, as many
tokens as the turn has; the scheduler then reads the recorded token in place of the sampled one. So engines do the same
work whoever asks them, and whoever asks gets the same turns. (What an engine reads in its own turn is what it sampled.
It reads what was recorded from the next turn on, as far as its prefix cache does not have it.)

The plugin also writes when each step begins (its first turn is asked for) and when its last turn is complete. vLLM
imports this module, so it imports no heavy package.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.lengths import NUM_GENERATIONS, NUM_PROMPTS, entry_point

VARIABLE = "GRPO_BENCH_SCRIPT"
MEASURED = 10
"""Problems from this number on are those of measured steps. The calls of the others take no time."""
END = "<|im_end|>"
FILLER = "I look at what the table of items says, and think about it. "
SHORTEST, LONGEST = 144, 600  # tokens of a turn
MEDIAN, SIGMA = 200, 0.6
THIRD_TURN = 0.25  # share of episodes with three turns; the others have two
LATENCY_SIGMA = 0.5


@dataclass(frozen=True, kw_only=True)
class Script:
    """All turns of the 64 episodes of a step: the same in each step. The last turn of an episode calls nothing."""

    latency: float
    """Median seconds of a call, log-normal; 0: calls take no time."""

    @cached_property
    def lengths(self) -> list[list[int]]:
        """Tokens of the turns of each episode."""
        rng = np.random.default_rng(0)
        turns = np.where(rng.random(NUM_PROMPTS * NUM_GENERATIONS) < THIRD_TURN, 3, 2)
        return [
            rng.lognormal(np.log(MEDIAN), SIGMA, count).clip(SHORTEST, LONGEST).astype(int).tolist() for count in turns
        ]

    @cached_property
    def milliseconds(self) -> list[list[int]]:
        """Return how many milliseconds each call of each episode takes."""
        rng = np.random.default_rng(1)
        return [
            [int(1000 * self.latency * factor) for factor in rng.lognormal(0, LATENCY_SIGMA, len(turns) - 1)]
            for turns in self.lengths
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens that a step samples."""
        return sum(map(sum, self.lengths))

    @property
    def num_calls(self) -> int:
        """Calls of a step."""
        return sum(map(len, self.milliseconds))

    @property
    def call_seconds(self) -> float:
        """Seconds of all calls of a step, one after the other."""
        return sum(map(sum, self.milliseconds)) / 1000

    def turn(self, problem: int, sample: int, number: int) -> str:
        """Return what an episode's turn says; each of its characters is a token, and so is its end."""
        place = problem % MEASURED * NUM_GENERATIONS + sample
        calls = self.milliseconds[place]
        call = ""
        if number < len(calls):
            sql = f"SELECT name FROM items WHERE id = {call_id(problem, sample, number)}"
            arguments = {"sql": sql, "milliseconds": calls[number] if problem >= MEASURED else 0}
            call = f"\n<tool_call>\n{json.dumps({'name': 'query', 'arguments': arguments})}\n</tool_call>"
        room = self.lengths[place][number] - len(call) - 1
        assert room > 0, "a turn is too short for its call"
        said = (FILLER * (room // len(FILLER) + 1))[: room - 1] + "."  # parsers cut spaces off the end
        return said + call + END

    def variables(self, folder: Path, tokenizer: Any) -> dict[str, str]:
        """Return variables with which vLLM imposes these turns; `folder` gets what it needs."""
        variables = entry_point(folder, "benchmarks.common.scripted:impose")
        letters = {tokenizer.encode(chr(code))[0]: chr(code) for code in range(32, 127)}
        turns = {
            str((problem, sample, number)): tokenizer.encode(self.turn(problem, sample, number))
            for problem in [*range(NUM_PROMPTS), *range(MEASURED, MEASURED + NUM_PROMPTS)]
            for sample in range(NUM_GENERATIONS)
            for number in range(len(self.lengths[problem % MEASURED * NUM_GENERATIONS + sample]))
        }
        (folder / "script.json").write_text(json.dumps({"letters": letters, "turns": turns}))
        return variables | {VARIABLE: str(folder)}


def call_id(problem: int, sample: int, number: int) -> int:
    """Return the number that a call asks for, by which later turns of its episode are known; below 2000."""
    return problem * 100 + sample * 10 + number


def question(step: int, position: int, warmup: int) -> list[dict[str, str]]:
    """Return the messages of a prompt; the problem's number says which turns follow."""
    problem = position + (MEASURED if step >= warmup else 0)
    text = f"Problem {problem}. Step {step:03d}. Query the table items(id, name), then answer. "
    return [{"role": "user", "content": text.ljust(256, "x")}]


def times(folder: Path) -> tuple[list[float], list[float]]:
    """Return when steps have begun, and when their last turns were complete, of `time.monotonic`."""
    if not (file := folder / "times.jsonl").exists():
        return [], []
    read = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [at for what, at in read if what == "begin"], [at for what, at in read if what == "end"]


class Prompter:
    """Gives requests their turns: the first ones of a problem in the order in which they come."""

    def __init__(self, folder: Path) -> None:
        script = json.loads((folder / "script.json").read_text())
        self._letters = {int(token): letter for token, letter in script["letters"].items()}
        self._turns: dict[str, list[int]] = script["turns"]
        self._times = folder / "times.jsonl"
        self._asked, self._ended, self._begun = Counter[int](), 0, 0
        self._lines: dict[str, tuple[list[int], bool]] = {}  # of unfinished requests; whether it is the last turn

    def begins(self, request: Any) -> None:
        """Take in a new request of the scheduler."""
        if request.max_tokens <= 1:  # a check of weights
            return
        problem, sample, number = self._place(request.prompt_token_ids)
        if number == 0:
            if self._begun % (NUM_PROMPTS * NUM_GENERATIONS) == 0:
                self._write("begin")
            self._begun += 1
        line = self._turns[str((problem, sample, number))]
        self._lines[request.request_id] = line, str((problem, sample, number + 1)) not in self._turns

    def speaks(self, requests: dict[str, Any], scheduled: Sequence[str], output: Any) -> None:
        """Put recorded tokens in place of those that a step of the model has sampled."""
        lines = {name: self._lines[name][0] for name in scheduled if name in self._lines}
        for name in replace(lines, requests, output):
            if requests[name].num_output_tokens == len(lines[name]) - 1:
                _, is_last = self._lines.pop(name)
                self._ended += is_last
                if is_last and self._ended % (NUM_PROMPTS * NUM_GENERATIONS) == 0:
                    self._write("end")

    def _place(self, token_ids: Sequence[int]) -> tuple[int, int, int]:
        """Return the problem, the sample and the number of the turn that follows a prompt."""
        text = "".join(self._letters.get(token, "\n") for token in token_ids)
        if asked := re.findall(r"WHERE id = (\d+)", text):
            tens, number = divmod(int(asked[-1]), 10)
            return tens // 10, tens % 10, number + 1
        (problem,) = map(int, re.findall(r"Problem (\d+)\.", text))
        sample = self._asked[problem] % NUM_GENERATIONS
        self._asked[problem] += 1
        return problem, sample, 0

    def _write(self, what: str) -> None:
        with self._times.open("a") as file:
            file.write(json.dumps([what, time.monotonic()]) + "\n")


def replace(lines: Mapping[str, Sequence[int | None]], requests: Mapping[str, Any], output: Any) -> list[str]:
    """Put the next token of each request's line in place of what a step of the model has sampled.

    It stays what it is where the line has None, and behind its end.

    Returns the names of requests for which the step has sampled one.
    """
    if output.logprobs is not None:
        output.logprobs = output.logprobs._replace(logprob_token_ids=output.logprobs.logprob_token_ids.copy())
    found = []
    for name, line in lines.items():
        request = requests.get(name)
        if request is None or request.is_finished():
            continue
        place = output.req_id_to_index[name]
        if not (output.sampled_token_ids and output.sampled_token_ids[place]):
            continue  # a part of its prompt
        found.append(name)
        number = request.num_output_tokens
        if number >= len(line) or (token := line[number]) is None:
            continue
        output.sampled_token_ids[place] = [token]
        if output.logprobs is not None:
            rows = output.logprobs.cu_num_generated_tokens
            output.logprobs.logprob_token_ids[place if rows is None else rows[place], 0] = token
    return found


def impose() -> None:
    """Let vLLM's scheduler read the turns of the environment's script; vLLM calls it as a plugin."""
    if VARIABLE not in os.environ:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    prompter = Prompter(Path(os.environ[VARIABLE]))
    add_request, update = Scheduler.add_request, Scheduler.update_from_output

    def add(scheduler: Any, request: Any) -> None:
        prompter.begins(request)
        add_request(scheduler, request)

    def update_from_output(scheduler: Any, scheduled: Any, output: Any) -> Any:
        prompter.speaks(scheduler.requests, list(scheduled.num_scheduled_tokens), output)
        return update(scheduler, scheduled, output)

    Scheduler.add_request, Scheduler.update_from_output = add, update_from_output
