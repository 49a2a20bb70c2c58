"""The cells of docs/comparison.md, as cells.yaml has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ROOT

FILE = Path(__file__).with_name("cells.yaml")
RESULTS = ROOT / "benchmarks/results/comparison.jsonl"
NO = "\N{EN DASH}"
LONGEST_QUOTE = 120


@dataclass(frozen=True)
class Source:
    """A repository at a commit; `package`: its files are also those of the installed package of this version."""

    name: str
    repository: str
    commit: str
    date: str
    code: tuple[str, ...]
    package: str | None = None

    @property
    def url(self) -> str:
        """The address at which GitHub shows its files, without the folder."""
        return f"https://github.com/{self.repository}/blob/{self.commit}"


@dataclass(frozen=True)
class Cell:
    """A cell of the page: `proofs` are paths in the source and lines there; or `nowhere` matches no file in `paths`."""

    table: str
    row: str
    source: Source
    says: str
    proofs: tuple[tuple[str, str], ...] = ()
    nowhere: str | None = None
    paths: tuple[str, ...] = ()

    @property
    def claim(self) -> dict[str, Any]:
        """The cell as the results have it, but for the lines where its proofs were found."""
        said = {"table": self.table, "row": self.row, "of": self.source.name, "says": self.says}
        at = {"repository": self.source.repository, "commit": self.source.commit}
        return said | at | ({"nowhere": self.nowhere, "in": [*self.paths]} if self.nowhere else {})


@dataclass(frozen=True)
class Row:
    """A row of the page: its own cell with paths of tests, and the cells of others in the order of the columns."""

    name: str
    here: str
    tests: tuple[str, ...]
    cells: tuple[Cell, ...]


def load(text: str | None = None) -> tuple[dict[str, Source], dict[str, list[Row]]]:
    """Return sources by name and rows by table; raise ValueError naming the row or cell that is not as it should be."""
    read = yaml.safe_load(FILE.read_text() if text is None else text)
    sources = {
        name: Source(name, **{**one, "date": str(one["date"]), "code": tuple(one["code"])})
        for name, one in read["sources"].items()
    }
    tables: dict[str, list[Row]] = {}
    for table, rows in read["tables"].items():
        columns = [name for name in next(iter(rows.values())) if name in sources]
        tables[table] = [_row(table, name, dict(row), columns, sources) for name, row in rows.items()]
    return sources, tables


def _row(table: str, name: str, row: dict[str, Any], columns: list[str], sources: dict[str, Source]) -> Row:
    here, *tests = _list(row.pop("here"))
    sought = row.pop("sought", None)
    if [*row] != columns:
        raise ValueError(f"{table}, {name}: columns are {', '.join(row)}, not {', '.join(columns)}")
    cells = tuple(_cell(table, name, sources[one], row[one], sought) for one in columns)
    return Row(name, here, tuple(tests), cells)


def _cell(table: str, row: str, source: Source, value: Any, sought: str | None) -> Cell:
    where = f"{row}, {source.name}"
    if value == NO:
        value = {"nowhere": sought}
    if isinstance(value, dict):
        if not value["nowhere"]:
            raise ValueError(f"{where}: {NO} needs `sought` of the row, {{nowhere: ...}}, or [{NO}, path, text]")
        return Cell(table, row, source, NO, (), value["nowhere"], tuple(_list(value.get("in", source.code))))
    says, *rest = _list(value)
    proofs = tuple(zip(rest[::2], rest[1::2], strict=False))
    if not proofs or len(rest) % 2:
        raise ValueError(f"{where}: use [what the page says, path, what stands there, ...]")
    if any(len(text) > LONGEST_QUOTE for _, text in proofs):
        raise ValueError(f"{where}: quote at most {LONGEST_QUOTE} characters")
    return Cell(table, row, source, says, proofs)


def _list(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]
