"""math-verify in a process of its own: `python -m grpo_workload.accuracy` is the process, `Verifier` speaks to it.

math-verify's time limits are SIGALRM's, which works in the main thread of a process alone, and not while a single big-integer
operation runs (9^{9^{9^9}}). A process has a main thread, and can be killed. It ends when its standard input does, so with its parent.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
from typing import Any

from grpo_workload import sandbox

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0  # sympy's import, on a cold disk
_PARSE_SECONDS = 3


class Verifier:
    """Compares answers with math-verify, one at a time, whatever a model may write."""

    def __init__(self, *, timeout: float = 15.0, memory_bytes: int = 8 << 30) -> None:
        """Comparisons that take longer than `timeout` seconds, beyond math-verify's own limits, or more memory, count as wrong."""
        self._timeout, self._memory_bytes = timeout, memory_bytes
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, gold: str, answer: str) -> float | None:
        """1.0 when `answer` (text of a completion) states what `gold` does, else 0.0; None when `gold` is not mathematics."""
        reply = _ask(self._process or self._start(), json.dumps([gold, answer]), self._timeout)
        if reply:
            verdict: float | None = json.loads(reply)
            return verdict
        self.close()
        logger.warning(
            "accuracy: comparing took over %.0f s, or too much memory, or ended its process; counted as wrong: %.200s",
            self._timeout,
            answer,
        )
        return 0.0

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "grpo_workload.accuracy", str(self._memory_bytes)]
        environment = sandbox.passed_environment(os.environ)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        if not _read(self._process, _START_SECONDS):
            self.close()
            raise RuntimeError(f"math-verify's process did not come up within {_START_SECONDS:.0f} s: {' '.join(command)}")
        return self._process


def _ask(process: subprocess.Popen[str], line: str, timeout: float) -> str:
    assert process.stdin is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return _read(process, timeout)


def _read(process: subprocess.Popen[str], timeout: float) -> str:
    """A line of the process, or nothing when it stays silent for `timeout` seconds or has ended."""
    assert process.stdout is not None
    # One request is one line of reply, so nothing waits in the buffer where select() would not see it.
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    return process.stdout.readline() if ready else ""


def verify_answer(gold: str, answer: str) -> float | None:
    """The comparison itself; only for the main thread of a process."""
    from math_verify import parse, verify

    gold_parsed = parse(gold, parsing_timeout=_PARSE_SECONDS)
    if not gold_parsed:
        return None
    parsed = parse(answer, parsing_timeout=_PARSE_SECONDS)
    # math-verify calculates: to it, "8 - 2 = ?" states 6, and a model soon learns to hand problems back.
    if _is_number(gold_parsed) and not _is_number(parsed):
        return 0.0
    return float(verify(gold_parsed, parsed, timeout_seconds=_PARSE_SECONDS))


def _is_number(parsed: list[Any]) -> bool:
    return bool(parsed) and getattr(parsed[0], "is_Number", False)


def _serve(memory_bytes: int) -> None:
    sandbox.isolate()  # what a model writes goes through sympy, which evaluates some of it
    sandbox.limit_memory(memory_bytes)
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints may come between
    verify_answer("1", "1")
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        print(json.dumps(verify_answer(gold, answer)), file=replies, flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
