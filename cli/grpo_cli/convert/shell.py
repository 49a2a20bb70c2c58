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
_ALL_OF = re.compile(r"^\$\{(\w+)\[@\]\}$")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ARRAY = "=("  # ends the first word of `NAME=(one two)`
_ENDS = {";", "&", "&&", "|", "||", "(", ")"}
_HIDE = str.maketrans("() #", "\0\1\2\3")  # characters that shlex must not see in some places
_SHOW = str.maketrans("\0\1\2\3", "() #")


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its words, and the variables that stand before it or were exported."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def commands(text: str) -> list[Command]:
    """Return the script's commands in order; variables that the script does not set stay as `$NAME`.

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
            spread = [one for word in words for one in arrays.get(_array(word), [expand(word, variables)])]
            found.append(Command(spread, exported | before))
        else:
            variables |= before
    return found


def _array(word: str) -> str:
    """The array that `${NAME[@]}` stands for; empty for other words."""
    match = _ALL_OF.match(word)
    return match[1] if match else ""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$A`, `${A}`, `${A:-default}` and `$((A * 2))` filled in; what is not known stays as it is."""

    def variable(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0] if match[3] is None else match[3])

    def arithmetic(match: re.Match[str]) -> str:
        expression = match[1].replace("$", "").strip()
        expression = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: variables.get(name[0], name[0]), expression)
        try:
            return str(_calculate(ast.parse(expression, mode="eval").body))
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
            raise ValueError("not an expression of whole numbers")


def _split(text: str) -> list[list[str]]:
    """The words of each command; a command ends with its line, unless a quote or an array is open."""
    split: list[list[str]] = []
    pending, continues = "", False
    for line in [*text.splitlines(), ""]:
        # A comment ends with its line, also when that ends with a backslash. Within quotes it is no comment.
        if line.lstrip().startswith("#") and (continues or not pending):
            continue
        continues = line.endswith("\\")
        pending += line[:-1] + " " if continues else line + "\n"
        if continues or (tokens := _tokens(pending)) is None:
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


def _tokens(text: str) -> list[str] | None:
    """Words and operators of `text`; None while a quote or an array is open."""
    # The parentheses of $((...)) do not end a command, and only a # that begins a word begins a comment.
    hidden = _ARITHMETIC.sub(lambda match: match[0].translate(_HIDE), text)
    hidden = re.sub(r"(?<=\S)#", "\3", hidden)
    lexer = shlex.shlex(hidden, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    try:
        tokens = [token.translate(_SHOW) for token in lexer]
    except ValueError:
        return None
    begun = [number for number in range(1, len(tokens)) if tokens[number] == "(" and tokens[number - 1].endswith("=")]
    return None if begun and ")" not in tokens[begun[-1] :] else tokens
