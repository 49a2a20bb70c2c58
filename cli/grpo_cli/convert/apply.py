"""Options through their format's table: fields and facts of a draft, and a finding for each option. Pure."""

from __future__ import annotations

import difflib
import re
from typing import Any

from grpo_cli.convert import values as v
from grpo_cli.convert.accelerate import ACCELERATE
from grpo_cli.convert.draft import Draft
from grpo_cli.convert.read import Source
from grpo_cli.convert.rows import UNSET, Finding, Kind, LeftError, Row, Table
from grpo_cli.convert.swift import SWIFT
from grpo_cli.convert.trl import TRL
from grpo_cli.convert.verl import VERL
from grpo_workload.contract import RESERVED_ENV

TABLES = {table.format: table for table in (TRL, ACCELERATE, SWIFT, VERL)}
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_UNRESOLVED = re.compile(r"\$\{?[\w(@]")
_PATHS = {"dataset", "model.name"}  # a path that is not known whole still says more than none
SHOWN_CHARS = 60


def apply(source: Source, draft: Draft) -> None:
    """Put `source` into `draft`. Raises ValueError that names the file and the option whose value is none of its kind."""
    table = TABLES[source.format]
    given: list[Row] = []
    for name, value in source.options.items():
        row = find(table, name)
        if row is None:
            _tell(draft, source, name, value, Kind.LEFT, note=_unknown(table, name))
            continue
        given.append(row)
        _take(draft, source, name, value, row)
    for name, text in source.environment.items():
        _variable(draft, source, table, name, text)
    _defaults(draft, source, table, given)


def find(table: Table, name: str) -> Row | None:
    """The row of `name`, or of the nearest section around it."""
    while name not in table.rows:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return table.rows[name]


def _unknown(table: Table, name: str) -> str:
    near = difflib.get_close_matches(name, table.rows, n=1, cutoff=0.6)
    meant = f": did you mean {near[0]}?" if near else ""
    return f"not an option of {table.format} that is known here{meant}"


def _take(draft: Draft, source: Source, name: str, value: Any, row: Row) -> None:
    harmless = any(v.equal(value, one) for one in row.harmless)
    if v.is_none(value) and row.default is UNSET and not harmless:
        _tell(draft, source, name, value, Kind.NOT_NEEDED, note="says nothing")
        return
    if isinstance(value, str) and _UNRESOLVED.search(value) and row.kind is not Kind.NOT_NEEDED and row.field not in _PATHS:
        _tell(draft, source, name, value, Kind.LEFT, row.field, "the script does not set this variable: put its value there")
        return
    if row.kind is Kind.LEFT:
        kind = Kind.NOT_NEEDED if harmless else Kind.LEFT
        _tell(draft, source, name, value, kind, note=f"so it is here: {row.note}" if harmless else row.note)
        return
    try:
        converted = row.convert(value)
    except LeftError as error:
        _tell(draft, source, name, value, Kind.LEFT, row.field, str(error))
        return
    except ValueError as error:
        raise ValueError(f"{source.file}: {name}: {error}") from error
    _put(draft, row, converted, row.note if row.kind is Kind.DIFFERENT else "")
    _tell(draft, source, name, value, row.kind, row.field, row.note)


def _defaults(draft: Draft, source: Source, table: Table, given: list[Row]) -> None:
    """What the other tool does where it is told nothing, if a job would do something else."""
    if all(name.startswith("rollout.") for name in source.options):
        return
    said = {(row.to, row.fact) for row in given}
    for row in table.rows.values():
        if row.default is not UNSET and (row.to, row.fact) not in said:
            _put(draft, row, row.convert(row.default), f"{table.format}'s default")
            _tell(draft, source, row.name, row.default, row.kind, row.field, f"not set: {table.format}'s default")


def _put(draft: Draft, row: Row, value: Any, why: str) -> None:
    if row.to:
        draft.set(row.to, value, why)
    if row.fact and value is not None:
        draft.facts[row.fact] = value


def _variable(draft: Draft, source: Source, table: Table, name: str, text: str) -> None:
    row = table.rows.get(name)
    if row is not None:
        _take(draft, source, name, text, row)
    elif name in RESERVED_ENV or name.startswith("RAY_"):
        _tell(draft, source, name, text, Kind.NOT_NEEDED, note="the operator starts every rank, without Ray")
    elif _SECRET.search(name):
        _tell(draft, source, name, "(hidden)", Kind.LEFT, note="a secret: put it into a Secret, and name that in podTemplate.envFrom")
    elif _UNRESOLVED.search(text):
        _tell(draft, source, name, text, Kind.LEFT, "podTemplate.env", "the script does not set this variable: put its value there")
    else:
        draft.fields.setdefault("podTemplate.env", []).append({"name": name, "value": text})
        _tell(draft, source, name, text, Kind.DIFFERENT, "podTemplate.env", "a variable of every pod")


def _tell(draft: Draft, source: Source, name: str, value: Any, kind: Kind, to: str = "", note: str = "") -> None:
    shown = " ".join(str(value).split())
    if len(shown) > SHOWN_CHARS:
        shown = f"{shown[: SHOWN_CHARS - 3]}..."
    draft.findings.append(Finding(source=source.format, name=name, value=shown, kind=kind, to=to, note=note))
