r"""Reference answers of a dataset, read as their authors meant them, in the form that math-verify reads: pure.

math-verify looks for math in prose. Given an answer by itself, it would read `11\sqrt{2}` as 11 and `1,3` as 1.3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

COLUMNS = ("solution", "answer")
"""Columns that may hold a reference, the preferred one first."""
ALL_NEEDED = "is_multiple_answer"
"""OlympiadBench's column: true where all values of a list are needed, instead of any one of them."""

References = tuple[str, ...]
"""Accepted answers, any of which is right, each as a text for `math_verify.parse`."""

_FINAL = "####"  # GSM8K's mark of the answer
_SAYS = re.compile(r"answer(?: is|:)\s*((?:.(?!answer(?: is|:)))+?)\.?\s*$", re.IGNORECASE)
_BETWEEN = re.compile(r"\s*\$?\s*(?:,|,?\s*and|,?\s*or)\s*\$?\s*")  # boxes of one answer
_DELIMITED = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_DELIMITER = re.compile(r"(?<!\\)\$|\\[()\[\]]")
_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_AMOUNT = re.compile(r"[-+\u2212]?[\d.,/]+(?:\s+(?!pi\b)[A-Za-z]{2,})+\.?")  # 72 clips
_MOST_WORDS = 5  # of an answer that is a text


def read_row(columns: Mapping[str, Any]) -> References:
    """Return the references of a row; empty if it has none that can be read.

    A `solution` that is prose, and does not mark its answer, is read only if there is no `answer`.
    """
    all_needed = columns.get(ALL_NEEDED) is True
    found = {name: read(columns[name], all_needed=all_needed) for name in COLUMNS if name in columns}
    readable = [name for name in found if found[name]]
    stated = [name for name in readable if not _is_vague(columns[name])]
    return found[next(iter(stated or readable))] if readable else ()


def read(value: Any, *, all_needed: bool = False) -> References:
    """Return what a column states: a text, a number, or a list of accepted answers; empty if it is none of these.

    Args:
        value: of one row.
        all_needed: an answer needs all values of a list, not any one of them.
    """
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    parts = [part for one in (value if is_list else [value]) if (part := _plain(one))]
    if all_needed and len(parts) > 1:
        parts = [", ".join(parts)]
    return tuple(dict.fromkeys(text for part in parts if (text := _for_math_verify(part))))


def _is_vague(value: Any) -> bool:
    """Whether the value is prose in which the answer is not marked: math-verify takes the last number or formula."""
    return isinstance(value, str) and r"\boxed" not in value and _FINAL not in value and _is_prose(value)


def boxed(text: str) -> list[tuple[str, int, int]]:
    """Return what each box of a text holds, with the places where the box begins and ends."""
    found = []
    for box in re.finditer(r"\\boxed\s*\{", text):
        depth, end = 1, box.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            found.append((text[box.end() : end - 1], box.start(), end))
    return found


def _last_boxed(text: str) -> str:
    """Return the last box, with those before it that belong to the same answer; empty if none ends."""
    contents: list[str] = []
    begins = None
    for content, start, end in reversed(boxed(text)):
        if begins is not None and not _BETWEEN.fullmatch(text[end:begins]):
            break
        contents.insert(0, content)
        begins = start
    return rf"\boxed{{{', '.join(contents)}}}" if contents else ""


def _plain(value: Any) -> str:
    """Return a text without `1e-7` for numbers; empty for what is none."""
    if isinstance(value, str):
        return value.strip().replace(r"\fbox", r"\boxed")
    if isinstance(value, Integral):
        return str(value)
    if isinstance(value, Real) and math.isfinite(value):
        return np.format_float_positional(float(value), trim="-")
    return ""


def _for_math_verify(text: str) -> str:
    """Return the text as it is, or its answer in a box; empty if the answer in it cannot be found."""
    if r"\boxed" in text:
        return _last_boxed(text)
    if _FINAL in text:
        return _for_math_verify(text.rpartition(_FINAL)[2].strip())
    if not _is_prose(text):
        return rf"\boxed{{{_DELIMITER.sub('', text).removesuffix('.')}}}"
    if _DELIMITED.search(text):
        return text
    if said := _SAYS.search(text):
        return rf"\boxed{{{said[1]}}}"
    return "" if re.search(r"\\[a-zA-Z]", text) or not re.search(r"\d", text) else text


def _is_prose(text: str) -> bool:
    """Whether the text has its answer somewhere; else it is one, if only of a few words."""
    words = _WORD.findall(_COMMAND.sub(" ", text))
    if _AMOUNT.fullmatch(text):
        return True
    return len(words) > _MOST_WORDS or (len(words) > 1 and bool(re.search(r"\d", text) or _SAYS.search(text)))
