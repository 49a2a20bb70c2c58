"""Arithmetic in what math-verify has read: sums such as `8 - 2` that are left to do, and numbers of very many digits.

math-verify calculates whatever it reads, some of it while it reads, so its tree and its text are both looked at. sympy,
which takes a second to import, is not imported by the rank.
"""

from __future__ import annotations

import math
import re
from typing import Any

# In what math-verify read, where it has calculated while it read.
_OPERATOR = re.compile(r"(?<=[\d)}!%])\s*(?:[-+*\u00d7·\u2212]|\\times|\\cdot)\s*(?=[\d({\\])")
_SCIENTIFIC = re.compile(r"(?:[*\u00d7·]|\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*[-+\u2212]?\d+\s*\}|[-+\u2212]?\d+)")
_QUOTIENTS = (
    re.compile(r"(?<![\d.])(\d{1,50})\s*(?:/|:|÷|\\div)\s*(\d{1,50})(?![\d.])"),
    re.compile(r"frac\s*\{\s*(\d{1,50})\s*\}\s*\{\s*(\d{1,50})\s*\}"),
    re.compile(r"frac\s*(\d)\s*(\d)"),
)


def stated_value(parsed: list[Any]) -> Any:
    """Return the right side of the last equation that was read, else what was read."""
    from math_verify.grader import is_equation, take_last_relation

    return take_last_relation(parsed[0]).rhs if is_equation(parsed[0]) else parsed[0]


def is_left(parsed: list[Any]) -> bool:
    """Whether a sum, difference or product of numbers is left to calculate, or a quotient that is a whole number."""
    from math_verify.grader import is_equation, take_first_relation
    from sympy import Basic, Number, preorder_traversal

    value = stated_value(parsed)
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
        return sum(map(is_rational, node.args)) > 1
    if not isinstance(node, Mul):
        return False
    factors = [one for one in node.args if is_rational(one) and abs(one) != 1 and not isinstance(one, UnevaluatedExpr)]
    if len(factors) != 2:
        return len(factors) > 2
    first, second = sorted(factors, key=lambda one: one.is_Pow)
    if second.is_Pow and second.exp == -1:
        return isinstance(first, Integer) and isinstance(second.base, Integer) and first % second.base == 0
    return not (second.is_Pow and second.base == 10)


def digits(node: Any) -> float:
    """Return about how many digits, before or after the point, it takes to calculate a tree; infinity if very many."""
    from sympy import Basic, Number, Pow, factorial

    if isinstance(node, Number):
        return math.log10(abs(node.p)) if node.is_Integer and node.p else 1.0
    if not isinstance(node, Basic):
        return 0.0
    if isinstance(node, Pow | factorial):
        exponent = digits(node.args[-1])
        return math.inf if exponent > 7 else max(1.0, digits(node.args[0])) * 10**exponent
    return sum(map(digits, node.args))


def is_rational(node: Any) -> bool:
    """Whether the node is a number, or is calculated from numbers by + - * / and whole powers."""
    from sympy import Add, Integer, Mul, Number, Pow, UnevaluatedExpr

    if isinstance(node, Pow):
        return is_rational(node.base) and isinstance(node.exp, Integer)
    return isinstance(node, Number) or (
        isinstance(node, Add | Mul | UnevaluatedExpr) and all(map(is_rational, node.args))
    )
