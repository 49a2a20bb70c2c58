"""Numbers and conditions of a script."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from grpo_cli.convert.shell.state import matches, negated
from grpo_cli.convert.shell.tree import Node
from grpo_cli.convert.shell.words import Words

_COMPARE = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_CHANGES = ("++", "--", "=", "+=", "-=", "*=", "/=", "%=")
_NUMBER = re.compile(r"\s*[+-]?(0|[1-9]\d*)\s*")  # 010 is 8 in a shell
_LARGEST = 2**63
# fmt: off
_COMPUTES: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "/": lambda first, second: abs(first) // abs(second) * (1 if first * second >= 0 else -1),
    "%": lambda first, second: first - second * _COMPUTES["/"](first, second),
}
# fmt: on


def calculate(op: str, first: int | None, second: int | None) -> int | None:
    """Return `first op second` as a shell computes it; None if it does not, or one of them is not known."""
    if first is None or second is None or op not in _COMPUTES:
        return None
    if (op in "/%" and not second) or (op == "**" and not 0 <= second < 64):
        return None
    result = int(_COMPUTES[op](first, second))
    return result if abs(result) < _LARGEST else None


class Conditions(Words):
    """Results of (( )), [ ] and [[ ]]; None where they are not known."""

    def arithmetic(self, node: Node) -> int | None:
        """Return the value of an arithmetic expression; None if it is not known."""
        match node["Type"]:
            case "Word":
                text = self.word(node)
                if re.fullmatch(r"[A-Za-z_]\w*", text):
                    value = self.variable(text)
                    text = (value[0] if value else "") if isinstance(value, list) else value or ""
                return int(text) if _NUMBER.fullmatch(text) else None
            case "ParenArithm":
                return self.arithmetic(node["X"])
            case "UnaryArithm" | "BinaryArithm" if node["Op"] in _CHANGES:
                return self._changed_number(node)
            case "UnaryArithm" if node["Op"] in ("+", "-", "!"):
                operand = self.arithmetic(node["X"])
                return None if operand is None else {"-": -operand, "+": operand, "!": int(not operand)}[node["Op"]]
            case "BinaryArithm" if node["Op"] in ("&&", "||"):
                first, ends = self.arithmetic(node["X"]), node["Op"] == "||"
                if first is not None and bool(first) == ends:
                    return int(ends)
                second = self.arithmetic(node["Y"])
                return None if first is None or second is None else int(bool(second))
            case "BinaryArithm":
                return calculate(node["Op"], self.arithmetic(node["X"]), self.arithmetic(node["Y"]))
        return None

    def _changed_number(self, node: Node) -> int | None:
        name = re.match(r"[A-Za-z_]\w*", self.text(node["X"]))
        old = None if node["Op"] == "=" else self.arithmetic(node["X"])
        by = self.arithmetic(node["Y"]) if "Y" in node else 1
        new = by if node["Op"] == "=" else calculate(node["Op"][0], old, by)
        if name is not None:
            is_whole = name[0] == self.text(node["X"]) and new is not None
            self.put(name[0], str(new) if is_whole else self.mark(node, "not a known number"))
        return old if node.get("Post") else new

    def test(self, node: Node) -> bool | None:
        """Return what [[ ]] says."""
        match node["Type"]:
            case "Word":
                return self.classic(["-n", self.word(node)])
            case "ParenTest":
                return self.test(node["X"])
            case "UnaryTest" if node["Op"] == "!":
                return negated(self.test(node["X"]))
            case "UnaryTest":
                return self.classic([node["Op"], self.word(node["X"])])
            case "BinaryTest" if node["Op"] in ("&&", "||"):
                ends = node["Op"] == "||"
                if (first := self.test(node["X"])) is ends:
                    return ends
                second = self.test(node["Y"])
                return ends if second is ends else None if first is None or second is None else not ends
            case "BinaryTest" if node["Op"] in ("=", "==", "!="):
                text, pattern = self.plain(self.word(node["X"])), self.plain(self.pattern(node["Y"]))
                return negated(matches(text, pattern), node["Op"] == "!=")
            case "BinaryTest" if node["Op"] in _COMPARE:
                return self.classic([self.word(node["X"]), node["Op"], self.word(node["Y"])])
        return None

    def classic(self, words: list[str]) -> bool | None:
        """Return what [ ] says of its words; files, and combinations with -a and -o, are not known."""
        known = [text for text in map(self.plain, words) if text is not None]
        if len(known) < len(words):
            return None
        match known:
            case []:
                return False
            case [text] | ["-n", text]:
                return text != ""
            case ["!", *rest] if len(rest) != 2 or rest[0] in ("-n", "-z", "-v"):
                return negated(self.classic(rest))
            case ["-z", text]:
                return text == ""
            case ["-v", name]:
                return None if self.state.sourced else self.variable(name) is not None
            case [first, "=" | "==", second]:
                return first == second
            case [first, "!=", second]:
                return first != second
            case [first, op, second] if op in _COMPARE and _NUMBER.fullmatch(first) and _NUMBER.fullmatch(second):
                return bool(calculate(_COMPARE[op], int(first), int(second)))
        return None
