"""The reward `accuracy`: math-verify in processes of its own, which compare while other completions are still sampled.

math-verify limits its time with SIGALRM. That works only in the main thread of a process, and not during a single
big-integer operation (9^{9^{9^9}}). A process has a main thread, and can be killed.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from queue import LifoQueue
from typing import Any

from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.rewards.process import RewardError, RewardProcess
from grpo_workload.rewards.worker import Values
from grpo_workload.spec.rewards import RewardConfig

logger = logging.getLogger(__name__)

NOT_COMPARED = math.nan
"""Verdict on an answer whose comparison took too long or too much memory, or crashed."""

_ANSWER_SECONDS = 15.0
_START_SECONDS = 120.0  # for the import of sympy from a cold disk
_PARSE_SECONDS = 3
_MOST_PROCESSES = 8  # of a rank: each takes some 150 MB
_NICENESS = 10  # the rank, and perhaps an engine, work at the same time


class Accuracy:
    """Compares completions with the gold answers in column `gold` of their prompts, each in one of several processes.

    An answer that cannot be compared is wrong, not a failure, and is counted.
    """

    def __init__(self, config: RewardConfig, gold: str, *, processes: int | None = None) -> None:
        """Start nothing yet. By default there is a process for each core that the rank has, up to 8."""
        self._gold = gold
        seconds = min(_ANSWER_SECONDS, config.timeout_seconds)
        count = processes or max(1, min(_MOST_PROCESSES, _cores()))
        self._verifiers = [Verifier(config, timeout=seconds) for _ in range(count)]
        # The last one that was used comes first, so that no more processes start than are needed.
        self._idle: LifoQueue[Verifier] = LifoQueue()
        for verifier in self._verifiers:
            self._idle.put(verifier)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=f"rewards[{config.name}]")
        self._verdicts: dict[tuple[str, str], Future[float | None]] = {}  # by gold answer and text
        self._not_compared = 0

    def begin(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        """Start to compare the completions of a prompt; calling the object with them later returns the verdicts."""
        for completion in completions:
            self._verdict(prompt, completion)

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], moved: Callable[[], None] = lambda: None
    ) -> Values:
        """Return the verdicts on completions[i], an answer to prompts[i]; call `moved` after each.

        Each answer has its own limit of time, so this ends.
        """
        pending = [self._verdict(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        values: Values = []
        for verdict in pending:
            value = verdict.result()
            moved()
            is_compared = value is None or not math.isnan(value)
            self._not_compared += not is_compared
            values.append(value if is_compared else 0.0)
        for prompt, completion in zip(prompts, completions, strict=True):  # those of later steps are kept
            self._verdicts.pop(self._pair(prompt, completion), None)
        return values

    def take_timeouts(self) -> int:
        """Return the number of answers that were not compared since the last call."""
        count, self._not_compared = self._not_compared, 0
        return count

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for verifier in self._verifiers:
            verifier.close()

    def _verdict(self, prompt: Prompt, completion: Completion) -> Future[float | None]:
        pair = self._pair(prompt, completion)
        if pair not in self._verdicts:
            self._verdicts[pair] = self._threads.submit(self._compare, *pair)
        return self._verdicts[pair]

    def _pair(self, prompt: Prompt, completion: Completion) -> tuple[str, str]:
        return str(prompt.columns[self._gold]), completion.text

    def _compare(self, gold: str, answer: str) -> float | None:
        verifier = self._idle.get()
        try:
            return verifier(gold, answer)
        finally:
            self._idle.put(verifier)


class Verifier:
    """One process with math-verify."""

    def __init__(self, config: RewardConfig, *, timeout: float = _ANSWER_SECONDS) -> None:
        """Set the limits of a comparison: `timeout` seconds, on top of math-verify's own, and `config.memory_limit`."""
        self._config = config.model_copy(update={"accuracy": None, "function": f"{__name__}:verify_answers"})
        self._timeout = timeout
        self._process: RewardProcess | None = None

    def __call__(self, gold: str, answer: str) -> float | None:
        """Return 1.0 if `answer`, a completion's text, states what `gold` does, else 0.0 or NOT_COMPARED.

        None if `gold` is no math.
        """
        process = self._process = self._process or self._start()
        try:
            (verdict,) = process.call({"golds": [gold], "completions": [answer]}, self._timeout)
        except RewardError:
            self.close()
            verdict = NOT_COMPARED
        if verdict is not None and math.isnan(verdict):
            logger.warning(
                "rewards[%s]: comparing an answer took too long or too much memory, or crashed; it counts as wrong: "
                "%.200s",
                self._config.name,
                answer,
            )
        return verdict

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> RewardProcess:
        # The threads that call it may end before it does.
        process = RewardProcess(self._config, os.environ, ends_with_thread=False)
        process.ready()
        process.call({"golds": ["1"], "completions": ["1"]}, _START_SECONDS)
        return process


def verify_answers(golds: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """Compare each completion with its gold answer; only for the main thread of a process."""
    return [_verify(gold, answer) for gold, answer in zip(golds, completions, strict=True)]


def _verify(gold: str, answer: str) -> float | None:
    from math_verify import parse, verify  # imports sympy, which the rank does not need

    timeouts = _timeouts()
    gold_parsed = parse(gold, parsing_timeout=_PARSE_SECONDS)
    if not gold_parsed:
        return None
    before = timeouts.count
    parsed = parse(answer, parsing_timeout=_PARSE_SECONDS)
    # math-verify calculates: for it, "8 - 2 = ?" states 6, and a model soon learns to repeat the problem.
    is_right = _is_number(parsed) or not _is_number(gold_parsed)
    is_right = is_right and verify(gold_parsed, parsed, timeout_seconds=_PARSE_SECONDS)
    return NOT_COMPARED if not is_right and timeouts.count > before else float(is_right)


def _is_number(parsed: list[Any]) -> bool:
    return bool(parsed) and getattr(parsed[0], "is_Number", False)


class _Timeouts(logging.Filter):
    """Counts math-verify's own time-outs, which it only logs; with them, one of several comparisons may succeed."""

    count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Count the record, and leave it out: the rank logs the answer."""
        is_timeout = str(record.msg).startswith("Timeout during")
        self.count += is_timeout
        return not is_timeout


@cache
def _timeouts() -> _Timeouts:
    """Prepare the process for its first comparison."""
    os.nice(_NICENESS)
    counter = _Timeouts()
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").addFilter(counter)
    return counter


def _cores() -> int:
    return len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
