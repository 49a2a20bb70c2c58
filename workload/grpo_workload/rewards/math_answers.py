"""The reward `accuracy`: math-verify in processes of its own, which compare while other completions are still sampled.

math-verify limits its time with SIGALRM. That works only in the main thread of a process, and not during a single
big-integer operation (9^{9^{9^9}}). A process has a main thread, and can be killed.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import LifoQueue, Queue
from threading import Thread
from typing import ClassVar

from grpo_spec.rewards import RewardConfig
from grpo_workload.algorithm.samples import Completion, Prompt
from grpo_workload.rewards import math_verdict
from grpo_workload.rewards.math_verdict import NOT_COMPARED
from grpo_workload.rewards.process import RewardProcess
from grpo_workload.rewards.references import COLUMNS, References, read_row
from grpo_workload.rewards.scorer import Circumstances, RewardError, Scorer
from grpo_workload.rewards.trl_signature import Values

logger = logging.getLogger(__name__)

CHECK_SECONDS = 30.0
"""Time in which references are compared with themselves when a rank starts. Others are compared at their step alone."""
_ANSWER_SECONDS = 15.0
_START_SECONDS = 120.0  # for the import of sympy from a cold disk
_MOST_PROCESSES = 8  # of a rank: each takes some 150 MB
_SHOWN = 100  # characters of a reference
_NAMED_ROWS = 5  # of those whose references cannot be compared


class Accuracy(Scorer):
    """Compares completions with the references of their prompts' rows, each in one of several processes.

    An answer that cannot be compared is wrong, not a failure, and is counted.
    """

    limits_itself: ClassVar[bool] = True  # each answer has its own limit, so all together may take long
    is_watched: ClassVar[bool] = False

    def __init__(self, config: RewardConfig, *, processes: int | None = None) -> None:
        """Start nothing yet. By default there is a process for each core that the rank has, up to 8."""
        self._name = config.name
        seconds = min(_ANSWER_SECONDS, config.timeout_seconds)
        count = processes or max(1, min(_MOST_PROCESSES, _cores()))
        self._verifiers = [Verifier(config, timeout=seconds) for _ in range(count)]
        # The last one that was used comes first, so that no more processes start than are needed.
        self._idle: LifoQueue[Verifier] = LifoQueue()
        for verifier in self._verifiers:
            self._idle.put(verifier)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=f"rewards[{config.name}]")
        self._verdicts: dict[tuple[References, str], Future[float | None]] = {}  # by references and text
        self._not_compared = 0
        self._to_check: Queue[Prompt | None] = Queue()  # None behind the last
        self._checked: dict[int, tuple[str, float | None]] = {}  # by row: what it has, and the verdict
        self._checker: Thread | None = None
        self._check_end = math.inf

    def check_row(self, prompt: Prompt) -> None:
        """Let a thread compare the references of a row with themselves, for CHECK_SECONDS from the first call."""
        if self._checker is None:
            self._check_end = time.monotonic() + CHECK_SECONDS
            # The end of Python does not wait for it.
            self._checker = Thread(target=self._check_rows, name=f"references[{self._name}]", daemon=True)
            self._checker.start()
        self._to_check.put(prompt)

    def _check_rows(self) -> None:
        for prompt in iter(self._to_check.get, None):
            if time.monotonic() > self._check_end:
                break
            if prompt.index not in self._checked:
                texts = [str(prompt.columns[name])[:_SHOWN] for name in COLUMNS if prompt.columns.get(name) is not None]
                verdict = self._compare(read_row(prompt.columns), None)
                self._checked[prompt.index] = (" / ".join(filter(None, texts)) or "nothing", verdict)

    def end_check(self, dataset: str) -> None:
        """Log a warning that names rows of `dataset` whose references no completion can be compared with."""
        if self._checker is None:
            return
        self._to_check.put(None)
        self._checker.join(max(0.0, self._check_end - time.monotonic()))
        self._check_end, self._checker = -math.inf, None
        compared, self._checked = self._checked, {}
        # A comparison that was slow, as on a machine that loads a model, says nothing about the row.
        if bad := {row: held for row, (held, verdict) in compared.items() if verdict in (None, 0.0)}:
            rows = [f"row {row}: {bad[row]}" for row in sorted(bad)[:_NAMED_ROWS]]
            logger.warning(
                "rewards[%s].accuracy: of the %d rows of %s that this rank has compared with themselves, %d have no "
                "answer that can be read, so that completions get nothing for them (%s%s). Let the column %s hold the "
                "answer alone, as LaTeX, a number or a few words, or end with it in \\boxed{} or after ####",
                self._name,
                len(compared),
                dataset,
                len(bad),
                "; ".join(rows),
                "; ..." if len(bad) > _NAMED_ROWS else "",
                " or ".join(COLUMNS),
            )

    def begin(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        """Start to compare the completions of a prompt; `score` returns the verdicts later."""
        gold = read_row(prompt.columns)
        for completion in completions:
            self._verdict(gold, completion.text)

    def score(self, prompts: list[Prompt], completions: list[Completion], circumstances: Circumstances) -> Values:
        """Return the verdicts on completions[i], an answer to prompts[i]; call `moved` after each.

        Each answer has its own limit of time, so this ends.
        """
        golds = {id(prompt): read_row(prompt.columns) for prompt in prompts}
        pairs = [(golds[id(prompt)], one.text) for prompt, one in zip(prompts, completions, strict=True)]
        pending = [self._verdict(*pair) for pair in pairs]
        values: Values = []
        for verdict in pending:
            value = verdict.result()
            circumstances.moved()
            is_compared = value is None or not math.isnan(value)
            self._not_compared += not is_compared
            values.append(value if is_compared else 0.0)
        for pair in pairs:  # those of later steps are kept
            self._verdicts.pop(pair, None)
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

    def _verdict(self, gold: References, answer: str) -> Future[float | None]:
        if (gold, answer) not in self._verdicts:
            self._verdicts[gold, answer] = self._threads.submit(self._compare, gold, answer)
        return self._verdicts[gold, answer]

    def _compare(self, gold: References, answer: str | None) -> float | None:
        verifier = self._idle.get()
        try:
            return verifier(gold, answer)
        finally:
            self._idle.put(verifier)


class Verifier:
    """One process with math-verify."""

    def __init__(self, config: RewardConfig, *, timeout: float = _ANSWER_SECONDS) -> None:
        """Set the limits of a comparison: `timeout` seconds, on top of math-verify's own, and `config.memory_limit`."""
        self._config = config.model_copy(
            update={"accuracy": None, "function": f"{math_verdict.__name__}:verify_answers"}
        )
        self._timeout = timeout
        self._process: RewardProcess | None = None

    def __call__(self, gold: References, answer: str | None) -> float | None:
        """Return the verdict of `verify_answers` on `answer`, a completion's text; None stands for `gold` itself."""
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
                answer or gold,
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
        process.call({"golds": [("1",)], "completions": ["1"]}, _START_SECONDS)
        return process


def _cores() -> int:
    return len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
