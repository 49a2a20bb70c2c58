"""The tables as Markdown, for docs/convert.md: `python -m grpo_cli.convert.pages docs/convert.md` writes them into it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from grpo_cli.convert.apply import TABLES
from grpo_cli.convert.rows import UNSET, Kind, Row, Table

MARK = "<!-- From here on written by `python -m grpo_cli.convert.pages docs/convert.md`. -->"


def page(text: str) -> str:
    """`text` with the tables of today below its mark. Raises ValueError when it has no mark."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"the page lacks the line {MARK}")
    return head + "\n".join([MARK, *(line for table in TABLES.values() for line in _section(table))]) + "\n"


def _section(table: Table) -> Iterator[str]:
    rows = list(table.rows.values())
    taken = [row for row in rows if row.kind in (Kind.SAME, Kind.DIFFERENT)]
    left = [row for row in rows if row.kind is Kind.LEFT]
    idle = [row for row in rows if row.kind is Kind.NOT_NEEDED]
    yield from ("", f"## {table.format}", "", f"Defaults are those of release {table.release}; names of older ones are read, too.")
    yield from ("", "| option | field | |", "|---|---|---|")
    yield from (f"| {names} | {f'`{row.field}`' if row.field else ''} | {_note(row)} |" for names, row in _together(taken))
    yield from ("", "Not taken over, unless the value is one in brackets:", "", "| option | why, and what to do |", "|---|---|")
    yield from (f"| {names}{_harmless(row)} | {_note(row)} |" for names, row in _together(left))
    yield from ("", "Not needed:", "")
    yield from (f"* {names}: {_note(row)}" for names, row in _together(idle))


def _together(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """Neighbours that say the same, on one line."""
    for _, group in groupby(rows, key=lambda row: (row.kind, row.field, row.note, row.harmless)):
        first, *others = group
        yield ", ".join(f"`{row.name}`" for row in (first, *others)), first


def _note(row: Row) -> str:
    default = "" if row.default is UNSET else f"default {row.default} is written out"
    return "; ".join(filter(None, (row.note, default))).replace("|", r"\|")


def _harmless(row: Row) -> str:
    words = [str(value) for value in row.harmless if value not in ("[]", "{}")]
    return f" ({', '.join(words)})" if words else ""


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
