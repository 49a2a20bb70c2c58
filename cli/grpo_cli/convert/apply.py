"""Apply a format's table to options: fields and facts of a draft, and a finding for each option. Pure."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from grpo_cli.convert import values as v
from grpo_cli.convert.accelerate import ACCELERATE
from grpo_cli.convert.draft import Draft
from grpo_cli.convert.read import Source
from grpo_cli.convert.rows import UNSET, Finding, Kind, LeftError, Row, Table
from grpo_cli.convert.swift import SWIFT
from grpo_cli.convert.trl import TRL
from grpo_cli.convert.verl import VERL
from grpo_spec.contract import RESERVED_ENV

TABLES = {table.format: table for table in (TRL, ACCELERATE, SWIFT, VERL)}
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_UNRESOLVED = re.compile(r"\$\{?[\w(@]")
_NO_VALUE = "the script does not set this variable: put its value there"
_PATHS = {"dataset", "evaluation.dataset", "model.name"}  # a path with an unknown part is still better than none
SHOWN_CHARS = 60


def apply(source: Source, draft: Draft) -> None:
    """Put `source` into `draft`. Raises ValueError naming the file and the option whose value is wrong."""
    applying = _Applying(source, draft, TABLES[source.format])
    for name, value in source.options.items():
        applying.option(name, value)
    for name, text in source.environment.items():
        applying.variable(name, text)
    # `swift rollout` is one half of a run: the defaults are those of `swift rlhf`.
    if not all(name.startswith("rollout.") for name in source.options):
        applying.defaults()


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
        row = find(self.table, name)
        if row is not None:
            self._take(name, value, row)
            return
        near = difflib.get_close_matches(name, self.table.rows, n=1, cutoff=0.6)
        meant = f": did you mean {near[0]}?" if near else ""
        self._tell(name, value, Kind.LEFT, note=f"not a known option of {self.table.format}{meant}")

    def variable(self, name: str, text: str) -> None:
        if row := self.table.rows.get(name):
            self._take(name, text, row)
        elif name in RESERVED_ENV or name.startswith("RAY_"):
            self._tell(name, text, Kind.NOT_NEEDED, note="the operator starts every rank, without Ray")
        elif _SECRET.search(name):
            note = "a secret: put it into a Secret, and name the Secret in podTemplate.envFrom"
            self._tell(name, "(hidden)", Kind.LEFT, note=note)
        elif _UNRESOLVED.search(text):
            self._tell(name, text, Kind.LEFT, "podTemplate.env", _NO_VALUE)
        else:
            self.draft.fields.setdefault("podTemplate.env", []).append({"name": name, "value": text})
            self._tell(name, text, Kind.DIFFERENT, "podTemplate.env", "set in every pod")

    def defaults(self) -> None:
        """Write what the other tool does by default where a job would do something else."""
        given = {(row.to, row.fact) for name in self.source.options if (row := find(self.table, name))}
        why = f"{self.table.format}'s default"
        for row in self.table.rows.values():
            if row.default is not UNSET and (row.to, row.fact) not in given:
                self._put(row, row.convert(row.default), why)
                self._tell(row.name, row.default, row.kind, row.field, f"not set: {why}")

    def _take(self, name: str, value: Any, row: Row) -> None:
        harmless = any(v.equal(value, one) for one in row.harmless)
        unresolved = isinstance(value, str) and _UNRESOLVED.search(value) and row.field not in _PATHS
        if v.is_none(value) and row.default is UNSET and not harmless:
            self._tell(name, value, Kind.NOT_NEEDED, note="has no value")
        elif unresolved and row.kind is not Kind.NOT_NEEDED:
            self._tell(name, value, Kind.LEFT, row.field, _NO_VALUE)
        elif row.kind is Kind.LEFT and harmless:
            self._tell(name, value, Kind.NOT_NEEDED, note=f"a job does so anyway: {row.note}")
        elif row.kind is Kind.LEFT:
            self._tell(name, value, Kind.LEFT, note=row.note)
        else:
            try:
                converted = row.convert(value)
            except LeftError as error:
                self._tell(name, value, Kind.LEFT, row.field, str(error))
                return
            except ValueError as error:
                raise ValueError(f"{self.source.file}: {name}: {error}") from error
            self._put(row, converted, row.note if row.kind is Kind.DIFFERENT else "")
            self._tell(name, value, row.kind, row.field, row.note)

    def _put(self, row: Row, value: Any, why: str) -> None:
        if row.to:
            self.draft.set(row.to, value, why)
        if row.fact and value is not None:
            self.draft.facts[row.fact] = value

    def _tell(self, name: str, value: Any, kind: Kind, to: str = "", note: str = "") -> None:
        shown = " ".join(str(value).split())
        if len(shown) > SHOWN_CHARS:
            shown = f"{shown[: SHOWN_CHARS - 3]}..."
        finding = Finding(source=self.source.format, name=name, value=shown, kind=kind, to=to, note=note)
        self.draft.findings.append(finding)
