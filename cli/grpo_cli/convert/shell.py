"""Commands of a shell script with their variables, read and never run. Pure."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ALL_OF = re.compile(r"^\$\{(\w+)\[@\]\}$")
_ARRAY = "=("
_ENDS = {";", "&", "&&", "|", "||", "(", ")"}


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its words, and the variables that are put before it or were exported."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def commands(text: str) -> list[Command]:
    """The script's commands in order, variables filled in as far as the script sets them; what is not set stays as `$NAME`.

    Raises ValueError when a quote is not closed.
    """
    found: list[Command] = []
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    for words in _split(text):
        if words[0].endswith(_ARRAY):
            arrays[words[0].removesuffix(_ARRAY)] = [expand(word, variables) for word in words[1:]]
            continue
        before: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.match(words[0])):
            before[match[1]] = expand(match[2], variables)
            words = words[1:]
        if words and words[0] == "export":
            for match in filter(None, map(_ASSIGNMENT.match, words[1:])):
                variables[match[1]] = exported[match[1]] = expand(match[2], variables)
        elif words:
            spread = [one for word in words for one in arrays.get(_name(word), [expand(word, variables)])]
            found.append(Command(spread, exported | before))
        else:
            variables |= before
    return found


def _name(word: str) -> str:
    """The array that all of a word stands for."""
    match = _ALL_OF.match(word)
    return match[1] if match else ""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$A`, `${A}`, `${A:-default}` and `$((A * 2))`; what is not known stays as it is."""

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, match[0] if match[3] is None else match[3])

    def arithmetic(match: re.Match[str]) -> str:
        expression = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: variables.get(name[0], name[0]), match[1].replace("$", ""))
        try:
            return str(_calculate(ast.parse(expression.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError):
            return match[0]

    return _VARIABLE.sub(variable, _ARITHMETIC.sub(arithmetic, text))


def _calculate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculate(operand)
        case ast.BinOp(left=first, op=op, right=second) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_calculate(first), _calculate(second))
        case _:
            raise ValueError("no arithmetic of whole numbers")


def _split(text: str) -> list[list[str]]:
    """The words of each command: lines end one, unless a quote is open."""
    split: list[list[str]] = []
    pending, goes_on = "", False
    for line in [*text.splitlines(), ""]:
        # A comment ends with its line, also when that ends with a backslash; within quotes it is none.
        if line.lstrip().startswith("#") and (goes_on or not pending):
            continue
        goes_on = line.endswith("\\")
        pending += line[:-1] + " " if goes_on else line + "\n"
        if goes_on:
            continue
        # One token for $((...)), whose parentheses would end a command.
        guarded = _ARITHMETIC.sub(lambda match: match[0].replace("(", "\0").replace(")", "\1").replace(" ", "\2"), pending)
        # shlex takes any # for a comment; a shell only one that begins a word.
        lexer = shlex.shlex(re.sub(r"(?<=\S)#", "\3", guarded), posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        try:
            tokens = [token.replace("\0", "(").replace("\1", ")").replace("\2", " ").replace("\3", "#") for token in lexer]
        except ValueError:
            continue
        if _is_open(tokens):
            continue
        pending = ""
        words: list[str] = []
        for token in [*tokens, ";"]:
            if token == "(" and words and words[-1].endswith("="):
                words[-1] += "("
            elif token not in _ENDS:
                words.append(token)
            elif words:
                split.append(words)
                words = []
    if pending.strip():
        raise ValueError(f"a quote or list is not closed: {pending.strip().splitlines()[0][:80]}")
    return split


def _is_open(tokens: list[str]) -> bool:
    """Whether an array's list goes on in the next line."""
    begun = [number for number in range(1, len(tokens)) if tokens[number] == "(" and tokens[number - 1].endswith("=")]
    return bool(begun) and ")" not in tokens[begun[-1] :]
