"""Apply a format's table to options: fields and facts of a draft, and a finding for each option. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.convert import values as v
from grpo_cli.convert.accelerate import ACCELERATE
from grpo_cli.convert.draft import Draft
from grpo_cli.convert.openrlhf import OPENRLHF
from grpo_cli.convert.read import SERVER
from grpo_cli.convert.rows import UNSET, Kind, Row, Source, Table
from grpo_cli.convert.swift import SWIFT
from grpo_cli.convert.trl import TRL
from grpo_cli.convert.verl import VERL
from grpo_spec.contract import is_reserved

TABLES = {table.format: table for table in (TRL, ACCELERATE, SWIFT, VERL, OPENRLHF)}
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_NEEDED = {"dataset", "model.name"}  # a job cannot do without
SHOWN_CHARS = 60


def apply(source: Source, draft: Draft) -> None:
    """Put `source` into `draft`. Raises ValueError naming the file and the option whose value is wrong."""
    applying = _Applying(source, draft, TABLES[source.format])
    for name, value in source.options.items():
        applying.option(name, value)
    for name, text in source.environment.items():
        applying.variable(name, text)
    for name, why in source.remarks:
        draft.left(name, "", why, "")


def apply_defaults(sources: Sequence[Source], draft: Draft) -> None:
    """Write what a tool does by default where a job would do something else, and none of its `sources` says it."""
    table = TABLES[sources[0].format]
    names = {name for source in sources for name in source.options}
    # `swift rollout` is one half of a run: the defaults are those of `swift rlhf`.
    if all(name.startswith(SERVER) for name in names):
        return
    given = {(row.field, row.fact) for name in names if (row := find(table, name))}
    applying, why = _Applying(sources[0], draft, table), f"{table.format}'s default"
    for row in table.rows.values():
        if row.default is not UNSET and (row.field, row.fact) not in given:
            applying.put(row, row.convert(row.default), why)
            applying.tell(row.name, row.default, row.kind, row.field, f"not set: {why}")


def find(table: Table, name: str) -> Row | None:
    """Return the row of `name`, or of the nearest section around it."""
    while name not in table.rows:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return table.rows[name]


@dataclass(frozen=True, slots=True)
class _Applying:
    source: Source
    draft: Draft
    table: Table

    def option(self, name: str, value: Any) -> None:
        if row := find(self.table, name):
            self._take(name, value, row)
        elif name in self.source.unknown:
            self.tell(name, value, Kind.LEFT, note=f"it may be options: {self._why(name)}")
        else:
            near = difflib.get_close_matches(name, self.table.rows, n=1, cutoff=0.6)
            meant = f": did you mean {near[0]}?" if near else ""
            self.tell(name, value, Kind.LEFT, note=f"not a known option of {self.table.format}{meant}")

    def variable(self, name: str, text: str) -> None:
        if row := self.table.rows.get(name):
            self._take(name, text, row)
        elif is_reserved(name) or name.startswith("RAY_"):
            self.tell(name, text, Kind.NOT_NEEDED, note="the operator starts every rank, without Ray")
        elif _SECRET.search(name):
            note = "a secret: put it into a Secret, and name the Secret in podTemplate.envFrom"
            self.tell(name, "(hidden)", Kind.LEFT, note=note)
        elif name in self.source.unknown:
            self.tell(name, text, Kind.LEFT, "podTemplate.env", self._why(name))
        else:
            self.draft.fields.setdefault("podTemplate.env", []).append({"name": name, "value": text})
            self.tell(name, text, Kind.DIFFERENT, "podTemplate.env", "set in every pod")

    def _take(self, name: str, value: Any, row: Row) -> None:
        harmless = any(v.equal(value, one) for one in row.harmless)
        unknown = name in self.source.unknown and bool(row.field or row.kind is Kind.LEFT)
        if unknown and row.field in _NEEDED:
            raise ValueError(f"{self.source.file}: {name}: {value} has no value: {self._why(name)}")
        if v.is_none(value) and row.default is UNSET and not harmless:
            self.tell(name, value, Kind.NOT_NEEDED, note="has no value")
        elif unknown:
            self.tell(name, value, Kind.LEFT, row.field, self._why(name))
        elif row.kind is Kind.LEFT and harmless:
            self.tell(name, value, Kind.NOT_NEEDED, note=f"a job does so anyway: {row.note}")
        elif row.kind is Kind.LEFT:
            self.tell(name, value, Kind.LEFT, note=row.note)
        else:
            try:
                converted = row.convert(value)
            except v.LeftError as error:
                self.tell(name, value, Kind.LEFT, row.field, str(error))
                return
            except ValueError as error:
                raise ValueError(f"{self.source.file}: {name}: {error}") from error
            self.put(row, converted, row.note if row.kind is Kind.DIFFERENT else "")
            self.tell(name, value, row.kind, row.field, row.note)

    def _why(self, name: str) -> str:
        return f"{self.source.unknown[name]}: put its value there, or give it with --set"

    def put(self, row: Row, value: Any, why: str) -> None:
        if row.field and not row.fact:
            self.draft.set(row.field, value, why)
        elif row.fact and value is not None:
            self.draft.facts[row.fact] = value

    def tell(self, name: str, value: Any, kind: Kind, to: str = "", note: str = "") -> None:
        shown = " ".join(str(value).split())
        if len(shown) > SHOWN_CHARS:
            shown = f"{shown[: SHOWN_CHARS - 3]}..."
        self.draft.find(kind, name, shown, note, to)
