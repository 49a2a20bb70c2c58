"""The tables as Markdown. `python -m grpo_cli.convert.pages docs/convert.md` writes them into the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from grpo_cli.convert.apply import TABLES
from grpo_cli.convert.rows import UNSET, Kind, Row, Table

MARK = "<!-- From here on written by `python -m grpo_cli.convert.pages docs/convert.md`. -->"


def page(text: str) -> str:
    """Return `text` with the present tables below its mark. Raises ValueError when it has no mark."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"the page lacks the line {MARK}")
    return head + "\n".join([MARK, *(line for table in TABLES.values() for line in _section(table))]) + "\n"


def _section(table: Table) -> Iterator[str]:
    def groups(*kinds: Kind) -> Iterator[tuple[str, Row]]:
        """Neighbouring options that say the same, and the row of the first."""
        rows = [row for row in table.rows.values() if row.kind in kinds]
        for _, group in groupby(rows, key=lambda row: (row.kind, row.field, row.note, row.harmless)):
            first, *others = group
            yield ", ".join(f"`{row.name}`" for row in (first, *others)), first

    yield f"\n## {table.format}\n"
    yield f"Defaults are those of release {table.release}; option names of older releases are read, too."
    yield "\n| option | field | note |\n|---|---|---|"
    for names, row in groups(Kind.SAME, Kind.DIFFERENT):
        yield f"| {names} | {f'`{row.field}`' if row.field else ''} | {_note(row)} |"
    yield "\nNot taken over, unless the value is one in brackets:\n\n| option | why, and what to do |\n|---|---|"
    for names, row in groups(Kind.LEFT):
        harmless = ", ".join(str(value) for value in row.harmless if value not in ("[]", "{}"))
        yield f"| {names}{f' ({harmless})' if harmless else ''} | {_note(row)} |"
    yield "\nNot needed:\n"
    yield from (f"* {names}: {_note(row)}" for names, row in groups(Kind.NOT_NEEDED))


def _note(row: Row) -> str:
    default = "" if row.default is UNSET else f"default {row.default} is written out"
    return "; ".join(filter(None, (row.note, default))).replace("|", r"\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
