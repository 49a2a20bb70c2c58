r"""Verdicts of math-verify, in a process of their own: what it finds equal is equal, with three exceptions.

* Arithmetic that the answer leaves to do. math-verify calculates: for it, `8 - 2 = ?` states 6, and a model soon learns
  to repeat the problem. A reference that has such arithmetic allows it.
* Words. For math-verify, those outside of `\text{}` are products of letters, so that `seat` would state `east`.
* Small numbers. Of those below 0.0001, three digits are compared, for math-verify would compare 0.
"""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from grpo_workload.rewards.references import References

NOT_COMPARED = math.nan
"""Verdict on an answer whose comparison took too long or too much memory, or crashed."""

_PARSE_SECONDS = 3
_DECIMALS = 6
_MOST_DIGITS = 1e5  # of a number that is calculated: a tower of powers would take for ever
_NICENESS = 10  # the rank, and perhaps an engine, work at the same time

# In what math-verify read, where it has calculated while it read.
_OPERATOR = re.compile(r"(?<=[\d)}!%])\s*(?:[-+*\u00d7·\u2212]|\\times|\\cdot)\s*(?=[\d({\\])")
_SCIENTIFIC = re.compile(r"(?:[*\u00d7·]|\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*[-+\u2212]?\d+\s*\}|[-+\u2212]?\d+)")
_QUOTIENTS = (
    re.compile(r"(\d+)\s*(?:/|:|÷|\\div)\s*(\d+)"),
    re.compile(r"frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}"),
    re.compile(r"frac\s*(\d)\s*(\d)"),
)

_MARKUP = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|boldsymbol)\b|\\[ ,;!]|[{}()*$~]|\s")
_LETTERS = re.compile(r"[^\W\d_][^\W\d_'\u2019-]*")
_PRODUCT = re.compile(r"[^\W\d_]{1,2}")  # letters that may be a product
_SAID = re.compile(r"(?:.*\banswer(?:\s+is)?\s*:?)?\s*(.+)", re.IGNORECASE)


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


@dataclass(frozen=True, slots=True)
class _Gold:
    """One accepted answer, and what is the same for all completions that are compared with it."""

    parsed: list[Any]  # math-verify's expression, if there is one, and the text that it read
    word: str | None
    decimals: int  # that are compared
    allows_arithmetic: bool


def _own_verdict(gold: References) -> float | None:
    verdicts = []
    for text in gold:
        one = _gold(text)
        # What is no math and no word is right only as the same characters.
        is_read = one is not None and (len(one.parsed) > 1 or one.word is not None)
        verdicts.append(_verdict((text,), rf"\boxed{{{one.parsed[-1]}}}") if one and is_read else None)
    return next((verdict for verdict in verdicts if verdict != 1.0), 1.0) if verdicts else None


def _verdict(gold: References, answer: str) -> float | None:
    accepted = [one for text in gold if (one := _gold(text))]
    if not accepted:
        return None
    timeouts = _timeouts()
    before = timeouts.count
    given = _parse(answer)
    if any(_states(one, given, answer) for one in accepted):
        return 1.0
    return NOT_COMPARED if timeouts.count > before else 0.0


@lru_cache(maxsize=64)  # all completions of a prompt have the same
def _gold(text: str) -> _Gold | None:
    """Return an accepted answer; None if it cannot be read."""
    if not (parsed := _parse(text)):
        return None
    allows = _is_left(parsed) or bool(getattr(_value(parsed), "free_symbols", ()))
    return _Gold(parsed, _word(parsed[-1]), _decimals(parsed), allows)


def _states(gold: _Gold, given: list[Any], answer: str) -> bool:
    from math_verify import verify  # imports sympy, which the rank does not need

    if gold.word is not None:
        read = _word(given[-1]) if given else None
        if gold.word in (read, None if r"\boxed" in answer else _word(_last_said(answer))):
            return True
        if read is not None and not (_PRODUCT.fullmatch(gold.word) and _PRODUCT.fullmatch(read)):
            return False
    if given and _digits(_value(given)) > _MOST_DIGITS:
        return bool(given[0] == gold.parsed[0])
    is_equal = verify(gold.parsed, given, float_rounding=gold.decimals, timeout_seconds=_PARSE_SECONDS)
    return is_equal and (gold.allows_arithmetic or not _is_left(given))


def _word(text: Any) -> str | None:
    """Return the letters of a text answer without case, spaces, parentheses and a full stop at its end; else None."""
    letters = _MARKUP.sub("", str(text)).removesuffix(".").casefold()
    return letters if _LETTERS.fullmatch(letters) else None


def _last_said(answer: str) -> str:
    """Return what the last line says after "answer is", or all of that line."""
    line = (answer.strip().splitlines() or [""])[-1]
    said = _SAID.fullmatch(line)
    return said[1] if said else line


def _value(parsed: list[Any]) -> Any:
    """Return the right side of the last equation that was read, else what was read."""
    from math_verify.grader import is_equation, take_last_relation

    return take_last_relation(parsed[0]).rhs if is_equation(parsed[0]) else parsed[0]


def _decimals(parsed: list[Any]) -> int:
    """Return the decimals that are compared: math-verify's 6, and more for numbers that would be 0 then."""
    value = _value(parsed)
    try:
        size = abs(float(value)) if _digits(value) <= _MOST_DIGITS else math.inf
    except (TypeError, ValueError, OverflowError):  # no number
        return _DECIMALS
    return max(_DECIMALS, 2 - math.floor(math.log10(size))) if 0 < size < math.inf else _DECIMALS


def _is_left(parsed: list[Any]) -> bool:
    """Whether a sum, difference or product of numbers is left to calculate, or a quotient that is a whole number."""
    from math_verify.grader import is_equation, take_first_relation
    from sympy import Basic, Number, preorder_traversal

    value = _value(parsed)
    if isinstance(value, str):
        return False
    if is_equation(parsed[0]) and isinstance(take_first_relation(parsed[0]).lhs, Number):
        return False  # `6 = 2 * 3` states 6
    if isinstance(value, Basic) and any(map(_calculates, preorder_traversal(value))):
        return True
    text = _SCIENTIFIC.sub("", _last_side(str(parsed[-1])))
    is_calculated = isinstance(value, Number) and _OPERATOR.search(text) is not None
    return is_calculated or any(_is_whole(*found) for pattern in _QUOTIENTS for found in pattern.findall(text))


def _last_side(text: str) -> str:
    """Return the last side of an equation that has a digit."""
    return next((side for side in reversed(re.split(r"=|≈|\\approx", text)) if re.search(r"\d", side)), "")


def _is_whole(numerator: str, denominator: str) -> bool:
    return int(denominator) > 1 and int(numerator) % int(denominator) == 0


def _calculates(node: Any) -> bool:
    """Whether the node of a tree adds or multiplies numbers; 3 * 10^8 and 3/4 are numbers themselves."""
    from sympy import Add, Integer, Mul, UnevaluatedExpr

    if isinstance(node, Add):
        return sum(map(_is_rational, node.args)) > 1
    if not isinstance(node, Mul):
        return False
    factors = [one for one in node.args if _is_rational(one) and abs(one) != 1 and not isinstance(one, UnevaluatedExpr)]
    if len(factors) != 2:
        return len(factors) > 2
    first, second = sorted(factors, key=lambda one: one.is_Pow)
    if second.is_Pow and second.exp == -1:
        return isinstance(first, Integer) and isinstance(second.base, Integer) and first % second.base == 0
    return not (second.is_Pow and second.base == 10)


def _digits(node: Any) -> float:
    """Return about how many digits, before or after the point, it takes to calculate a tree; infinity if very many."""
    from sympy import Basic, Number, Pow, factorial

    if isinstance(node, Number):
        return math.log10(abs(node.p)) if node.is_Integer and node.p else 1.0
    if not isinstance(node, Basic):
        return 0.0
    if isinstance(node, Pow | factorial):
        exponent = _digits(node.args[-1])
        return math.inf if exponent > 7 else max(1.0, _digits(node.args[0])) * 10**exponent
    return sum(map(_digits, node.args))


def _is_rational(node: Any) -> bool:
    """Whether the node is a number, or is calculated from numbers by + - * / and whole powers."""
    from sympy import Add, Integer, Mul, Number, Pow, UnevaluatedExpr

    if isinstance(node, Pow):
        return _is_rational(node.base) and isinstance(node.exp, Integer)
    return isinstance(node, Number) or (
        isinstance(node, Add | Mul | UnevaluatedExpr) and all(map(_is_rational, node.args))
    )


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
