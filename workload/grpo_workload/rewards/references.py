r"""Reference answers of a dataset, read as their authors meant them, in the form that math-verify reads: pure.

math-verify looks for math in prose. Given an answer by itself, it would read `11\sqrt{2}` as 11 and `1,3` as 1.3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Rational, Real
from typing import Any

import numpy as np

COLUMNS = ("solution", "answer")
"""Columns that may hold a reference, the preferred one first."""
ALL_NEEDED = "is_multiple_answer"
"""OlympiadBench's column: true where all values of a list are needed, instead of any one of them."""

References = tuple[str, ...]
"""Accepted answers, any of which is right, each as a text for `math_verify.parse`."""

_FINAL = "####"  # GSM8K's mark of the answer
_SAYS = re.compile(r"answer(?: is\b|:)", re.I)
_NOTHING = {"n/a", "none", "null", "nan", "not found", "see above", "-", ".", "..."}
_BETWEEN = re.compile(r"[\s$,;.]*(?:and|or)?[\s$,]*(?:\\?[a-zA-Z]\w*\s*=|\([a-z]\))?[\s$]*")  # boxes of one answer
_LONGEST_GAP = 40
_MOST_BOXES = 50  # the last ones of a text
_DELIMITED = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[()\[\]]")
_LATEX = re.compile(
    r"\\(?:begin|end)\s*\{[^{}]*\}|\\(?:text\w*|mbox|math\w+|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+|_\{[^{}]*\}|_\w"
)
_WORD = re.compile(r"(?<![\w{^])[A-Za-z]{3,}(?=[\s.,;:!?'\u2019)]|$)")
_OF_MATH = re.compile(r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|exp|max|min|lim|gcd|lcm|mod|det|sqrt|and", re.I)
_AMOUNT = re.compile(r"([-+\u2212]?[$\u20ac\u00a3]?\d[\d.,/]*)(?:\s+(?!pi\b|e\b|i\b)[A-Za-z]+)+\.?")  # 72 clips
_MULTIPLES = re.compile(r"\b(?:dozens?|hundreds?|thousands?|[mbtr]+illions?|percent|and|or|to|out)\b", re.I)
_MATH = re.compile(r"[=^+*<>]|\\[a-zA-Z]")
_MOST_WORDS = 5  # of an answer that is a text


def read_row(columns: Mapping[str, Any]) -> References:
    """Return the references of a row; empty if it has none that can be read.

    A `solution` that is prose, and does not mark its answer, is read only if there is no `answer`.
    """
    all_needed = str(columns.get(ALL_NEEDED)).lower() in ("true", "1")
    found = {name: read(columns[name], all_needed=all_needed) for name in COLUMNS if name in columns}
    readable = [name for name in found if found[name]]
    stated = [name for name in readable if not any(map(_is_vague, _listed(columns[name])))]
    return found[next(iter(stated or readable))] if readable else ()


def read(value: Any, *, all_needed: bool = False) -> References:
    """Return what a column states: a text, a number, or a list of accepted answers; empty if it is none of these.

    Args:
        value: of one row.
        all_needed: an answer needs all values of a list, not any one of them.
    """
    parts = [part for one in _listed(value) if (part := _plain(one))]
    if all_needed and len(parts) > 1:
        parts = [", ".join(parts)]
    return tuple(dict.fromkeys(text for part in parts if (text := _for_math_verify(part))))


def boxed(text: str) -> list[tuple[str, int, int]]:
    """Return what each of the last boxes of a text holds, with the places where the box begins and ends."""
    found = []
    for box in list(re.finditer(r"\\boxed\s*\{", text))[-_MOST_BOXES:]:
        depth, end = 1, box.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            found.append((text[box.end() : end - 1], box.start(), end))
    return found


def _listed(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | memoryview | Mapping)
    return list(value) if is_list else [value]


def _is_vague(value: Any) -> bool:
    """Whether the value is a text of several lines, or prose, in which the answer is not marked."""
    if not isinstance(value, str) or r"\boxed" in value or _marked(value) is not None:
        return False
    return "\n" in value.strip() or not _is_answer(" ".join(value.split()))


def _plain(value: Any) -> str:
    """Return a text, without `1e-7` for numbers; empty for what is neither."""
    if isinstance(value, str):
        return "" if value.strip().lower() in _NOTHING else value.strip().replace(r"\fbox", r"\boxed")
    try:
        if isinstance(value, np.bool_ | Rational):
            return str(value)
        if isinstance(value, Decimal):
            return f"{value:f}" if value.is_finite() else ""
        if isinstance(value, Real) and math.isfinite(value):
            number: Any = value  # with numpy's own types, few digits are enough
            return np.format_float_positional(number, trim="-")
    except (ValueError, OverflowError):  # an integer of thousands of digits
        return ""
    return ""


def _marked(text: str) -> str | None:
    """Return what follows the last `####`, if that is the end; None if there is none."""
    tail = text.rpartition(_FINAL)[2].strip() if _FINAL in text else ""
    return tail if tail and "\n" not in tail else None


def _for_math_verify(text: str) -> str:
    """Return the answer in a box, or prose in which math-verify finds it; empty if it cannot be found."""
    if r"\boxed" in text:
        return _last_boxed(text)
    if (marked := _marked(text)) is not None:
        return _for_math_verify(marked)
    text = " ".join(text.split())
    if says := list(_SAYS.finditer(text)):
        return _for_math_verify(text[says[-1].end() :]) if text[says[-1].end() :].strip() else ""
    if amount := _AMOUNT.fullmatch(text):
        return "" if _MULTIPLES.search(text) else rf"\boxed{{{amount[1]}}}"
    if _is_answer(text):
        bare = _DELIMITER.sub("", text).strip()
        return rf"\boxed{{{bare.removesuffix('.') if bare.count('.') == 1 else bare}}}"
    is_long = len(_words(text)) > _MOST_WORDS and not re.search(r"\\[a-zA-Z]", text)
    return text if _DELIMITED.search(text) or (is_long and re.search(r"\d", text)) else ""


def _last_boxed(text: str) -> str:
    """Return the last box, with those before it that belong to the same answer; empty if there is nothing in it."""
    contents: list[str] = []
    begins = None
    for content, start, end in reversed(boxed(text)):
        gap = "" if begins is None else text[end:begins]
        if len(gap) > _LONGEST_GAP or not _BETWEEN.fullmatch(gap):
            break
        contents.insert(0, content.strip())
        begins = start
    return rf"\boxed{{{', '.join(contents)}}}" if all(contents) and contents else ""


def _is_answer(text: str) -> bool:
    """Whether the text is an answer, of math or of a few words, and not prose that has one somewhere."""
    words = _words(text)
    if not re.search(r"\d|\\", text):
        return len(words) <= _MOST_WORDS
    return not words or (len(words) == 1 and _MATH.search(text) is not None)


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(_LATEX.sub(" ", text)) if not _OF_MATH.fullmatch(word)]
