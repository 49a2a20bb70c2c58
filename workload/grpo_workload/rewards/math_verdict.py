r"""Verdicts of math-verify, in a process of their own: what it finds equal is equal, with three exceptions.

* Arithmetic that the answer leaves to do. math-verify calculates: for it, `8 - 2 = ?` states 6, and a model soon learns
  to repeat the problem. A reference that has such arithmetic allows it.
* Words. For math-verify, those outside of `\text{}` are products of letters, so that `seat` would state `east`.
* Small numbers. Those below 0.0001 are compared up to a thousandth of them, for math-verify would compare 0.
"""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from grpo_workload.rewards.arithmetic import digits, is_left, is_rational, stated_value
from grpo_workload.rewards.references import References, boxed

NOT_COMPARED = math.nan
"""Verdict on an answer whose comparison took too long or too much memory, or crashed."""

_PARSE_SECONDS = 3
_SMALL, _CLOSE = 1e-4, 1e-3  # numbers below the first are equal up to this part
_FLOAT_DIGITS = 300
_MOST_DIGITS = 1e5  # of a number that is calculated: a tower of powers would take for ever
_NICENESS = 10  # the rank, and perhaps an engine, work at the same time

_MARKUP = re.compile(r"\\(?:text\w*|mbox|math\w+|boldsymbol)\b|\\[ ,;!]|[{}()*$~]|\s")
_WORD = re.compile(r"[^\W\d_](?:[^\W\d_]|['\u2019-])*")
_CHOICE = re.compile(r"\(?([A-J])[).](.*)")  # with its text: (B) 12
_SAID = re.compile(r"(?:.*\banswer(?:\s+is)?\s*:?)?\s*(.+)", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def verify_answers(golds: list[References], completions: list[str | None], **_: Any) -> list[float | None]:
    """Compare each completion with its references; only for the main thread of a process.

    Args:
        golds: references of each completion.
        completions: their texts; None stands for the references themselves, each in a box, of which all must be right.

    Returns:
        For each completion 1.0, 0.0 or NOT_COMPARED; None where no reference can be read.
    """
    return [
        _own_verdict(gold) if answer is None else _verdict(gold, answer)
        for gold, answer in zip(golds, completions, strict=True)
    ]


class _TimedOutError(Exception):
    """math-verify did not read a reference in its time; it may the next time."""


@dataclass(frozen=True, slots=True)
class _Gold:
    """One accepted answer, and what is the same for all completions that are compared with it."""

    parsed: list[Any]  # math-verify's expression, if there is one, and the text that it read
    word: str | None
    small: float | None  # a number that six decimals do not tell from 0
    allows_arithmetic: bool


def _own_verdict(gold: References) -> float | None:
    verdicts = []
    for text in gold:
        try:
            one = _gold(text)
        except _TimedOutError:
            return NOT_COMPARED
        # What is no math and no word is right only as the same characters.
        is_read = one is not None and (len(one.parsed) > 1 or one.word is not None)
        verdicts.append(_verdict((text,), rf"\boxed{{{one.parsed[-1]}}}") if one and is_read else None)
    return next((verdict for verdict in verdicts if verdict != 1.0), 1.0) if verdicts else None


def _verdict(gold: References, answer: str) -> float | None:
    try:
        accepted = [one for text in gold if (one := _gold(text))]
    except _TimedOutError:
        return NOT_COMPARED
    if not accepted:
        return None
    timeouts = _timeouts()
    before = timeouts.count
    answer = _without_thoughts(answer)
    given = _parse(answer)
    if any(_states(one, given, answer) for one in accepted):
        return 1.0
    return NOT_COMPARED if timeouts.count > before else 0.0


def _without_thoughts(answer: str) -> str:
    """Return what follows <think>...</think>, with what is in <answer>...</answer> in a box."""
    if "</think>" in answer:
        answer = answer.rpartition("</think>")[2]
    elif answer.lstrip().startswith("<think>"):  # cut before it answered
        return ""
    tagged = _TAGGED.findall(answer)
    if not tagged:
        return answer
    return tagged[-1] if r"\boxed" in tagged[-1] else rf"\boxed{{{tagged[-1].strip().strip('$')}}}"


@lru_cache(maxsize=64)  # all completions of a prompt have the same
def _gold(text: str) -> _Gold | None:
    """Return an accepted answer; None if it cannot be read. _TimedOutError, which is not kept."""
    timeouts = _timeouts()
    before = timeouts.count
    if not (parsed := _parse(text)):
        if timeouts.count > before:
            raise _TimedOutError
        return None
    boxes = boxed(text)
    raw = boxes[-1][0] if boxes else str(parsed[-1])
    allows = is_left(parsed) or bool(getattr(stated_value(parsed), "free_symbols", ()))
    return _Gold(parsed, _choice(raw) or _word(raw), _small(parsed), allows)


def _states(gold: _Gold, given: list[Any], answer: str) -> bool:
    from math_verify import verify  # imports sympy, which the rank does not need

    if gold.word is not None:
        boxes = boxed(answer)
        said = boxes[-1][0] if boxes else _last_said(answer)
        words = {_word(said), _word(given[-1]) if given and not boxes else None}
        if len(gold.word) == 1 and (choice := _choice(said)) is not None:
            return gold.word == choice
        if gold.word in words:
            return True
        if any(word is not None and _are_words(gold.word, word) for word in words):
            return False
    value: Any = stated_value(given) if given else None
    if digits(value) > _MOST_DIGITS:
        return bool(given[0] == gold.parsed[0])
    if gold.small is not None and is_rational(value):
        return digits(value) < _FLOAT_DIGITS and math.isclose(gold.small, float(value.doit()), rel_tol=_CLOSE)
    is_equal = bool(verify(gold.parsed, given, timeout_seconds=_PARSE_SECONDS))
    return is_equal and (gold.allows_arithmetic or not is_left(given))


def _word(text: Any) -> str | None:
    """Return the letters of a text answer without case, spaces, parentheses and a full stop at its end; else None."""
    letters = _MARKUP.sub("", str(text)).removesuffix(".").casefold()
    is_word = _WORD.fullmatch(letters) and all(one.isalpha() or one in "'\u2019-" for one in letters)
    return letters if is_word else None


def _choice(text: str) -> str | None:
    """Return the letter of a choice that is given with its text; None if it is none, or names another one, too."""
    found = _CHOICE.fullmatch(" ".join(re.sub(r"\\(?:text\w*|math\w+)\b|\\[ ,;!]|[{}$*]", " ", text).split()))
    return found[1].casefold() if found and not re.search(r"\b[A-J]\b", found[2]) else None


def _are_words(word: str, other: str) -> bool:
    """Whether they differ as texts do; else they may be products of letters, in any order."""
    return {word, other} & {"yes", "no"} != set() or any(
        len(one) > 3 and re.search("[aeiou]", one) is not None for one in (word, other)
    )


def _last_said(answer: str) -> str:
    """Return what the last line says after "answer is", or all of that line."""
    line = (answer.strip().splitlines() or [""])[-1]
    said = _SAID.fullmatch(line)
    return said[1] if said else line


def _small(parsed: list[Any]) -> float | None:
    """Return a number that six decimals do not tell from 0; None for any other, and for what is none."""
    value = stated_value(parsed)
    if not is_rational(value) or digits(value) > _FLOAT_DIGITS:
        return None
    number = float(value.doit())
    return number if 0 < abs(number) < _SMALL else None


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    _timeouts()
    return list(parse(text, parsing_timeout=_PARSE_SECONDS))


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
