"""math-verify in its own process, as for users' functions: `verify_answers` runs there, `Verifier` calls it.

math-verify limits its time with SIGALRM. That works only in the main thread of a process, and not during a single
big-integer operation (9^{9^{9^9}}). A process has a main thread, and can be killed.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from grpo_workload.rewards.process import RewardError, RewardProcess
from grpo_workload.spec.inputs import RewardConfig

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0  # for the import of sympy from a cold disk
_PARSE_SECONDS = 3


class Verifier:
    """Compares answers with math-verify, one at a time; an answer that cannot be compared is wrong, not a failure."""

    def __init__(self, config: RewardConfig, *, timeout: float = 15.0) -> None:
        """Set the limits of a comparison: `timeout` seconds, on top of math-verify's own, and `config.memory_limit`."""
        self._config = config.model_copy(update={"accuracy": None, "function": f"{__name__}:verify_answers"})
        self._timeout = timeout
        self._process: RewardProcess | None = None

    def __call__(self, gold: str, answer: str) -> float | None:
        """Return 1.0 if `answer`, a completion's text, states what `gold` does, else 0.0. None if `gold` is no math."""
        process = self._process = self._process or self._start()
        try:
            (verdict,) = process.call({"golds": [gold], "completions": [answer]}, self._timeout)
            return verdict
        except RewardError:
            logger.warning(
                "rewards[%s]: comparing an answer took over %.0f s or too much memory, or crashed; it counts as wrong: "
                "%.200s",
                self._config.name,
                self._timeout,
                answer,
            )
            self.close()
            return 0.0

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> RewardProcess:
        # Rewards are called in a new thread at each step, which the process must outlive.
        process = RewardProcess(self._config, os.environ, ends_with_thread=False)
        process.ready()
        process.call({"golds": ["1"], "completions": ["1"]}, _START_SECONDS)
        return process


def verify_answers(golds: list[str], completions: list[str]) -> list[float | None]:
    """Compare each completion with its gold answer; only for the main thread of a process."""
    return [_verify(gold, answer) for gold, answer in zip(golds, completions, strict=True)]


def _verify(gold: str, answer: str) -> float | None:
    from math_verify import parse, verify  # imports sympy, which the rank does not need

    gold_parsed = parse(gold, parsing_timeout=_PARSE_SECONDS)
    if not gold_parsed:
        return None
    parsed = parse(answer, parsing_timeout=_PARSE_SECONDS)
    # math-verify calculates: for it, "8 - 2 = ?" states 6, and a model soon learns to repeat the problem.
    if _is_number(gold_parsed) and not _is_number(parsed):
        return 0.0
    return float(verify(gold_parsed, parsed, timeout_seconds=_PARSE_SECONDS))


def _is_number(parsed: list[Any]) -> bool:
    return bool(parsed) and getattr(parsed[0], "is_Number", False)
